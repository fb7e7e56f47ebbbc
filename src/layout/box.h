#pragma once

#include "layout/flat_layout.h"

#include <cstdint>
#include <span>
#include <vector>

namespace fsdp::detail {

/// A box inside an n-dimensional array: `sizes[d]` elements from `offsets[d]`.
/// Both have one entry per dimension.
struct Box {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;

  /// The product of `sizes`: 1 for a box of a 0-d array.
  int64_t numel() const;
  bool operator==(const Box&) const = default;
};

/// Cuts elements [begin, end) of a contiguous (row-major) array of shape
/// `sizes` into boxes, in order: at most 2 * ndim - 1 of them, one for a 0-d
/// array, none for an empty interval. Box after box, each in row-major order,
/// the elements are those of the interval in their order.
///
/// Throws std::invalid_argument when the interval does not lie inside the
/// array, when a size is negative, or when the array has more elements than an
/// int64_t can count.
std::vector<Box> boxes_of(Interval interval, std::span<const int64_t> sizes);

/// The common part of two boxes of one array; numel() is 0 when there is none.
/// Throws std::invalid_argument when they have different numbers of dimensions.
Box intersect(const Box& a, const Box& b);

} // namespace fsdp::detail
