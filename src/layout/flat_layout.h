#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fsdp::detail {

/// Elements [begin, end) of a flat index space.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t numel() const { return end - begin; }
  bool empty() const { return end <= begin; }
  bool operator==(const Interval&) const = default;
};

/// The common part of two intervals; empty (begin == end == the later begin)
/// when there is none.
Interval intersect(Interval a, Interval b);

/// Parameters start, and slices end, at a multiple of this many elements.
inline constexpr int64_t kAlignmentNumel = 64;

/// How the parameters of one flat group lie in one index space, and which part
/// each rank owns. Every question of sharding is arithmetic on intervals:
/// parameter i owns interval(i); the rank at position p owns the slice
/// [p * slice_numel(), (p + 1) * slice_numel()).
///
/// Members that take an `index` or a `rank` throw std::invalid_argument when
/// it is outside [0, size()) or [0, world_size()).
class FlatLayout {
 public:
  /// `numels`: elements of each parameter, in order (0 is allowed).
  /// Throws std::invalid_argument when a count is negative, when world_size is
  /// less than 1, or when the counts add up to more than an int64_t can index.
  FlatLayout(std::span<const int64_t> numels, int world_size);

  int world_size() const { return world_size_; }

  /// The number of parameters.
  int64_t size() const { return static_cast<int64_t>(intervals_.size()); }

  /// All elements, with padding: world_size() * slice_numel().
  int64_t total_numel() const { return world_size_ * slice_numel_; }

  /// Elements each rank owns, with padding: the smallest multiple of
  /// kAlignmentNumel with which the slices reach the end of the last parameter.
  /// The same for all ranks; 0 when there are no elements.
  int64_t slice_numel() const { return slice_numel_; }

  /// Where parameter `index` lies. One without elements has an empty interval
  /// at the place where it would start.
  Interval interval(int64_t index) const;

  /// What the rank at position `rank` owns.
  Interval slice(int rank) const;

  /// The part of parameter `index` that `rank` owns, relative to the
  /// parameter's first element; [0, 0) when it owns none of it.
  Interval owned_of_parameter(int64_t index, int rank) const;

  /// The same part, relative to the first element of the rank's slice; [0, 0)
  /// when it owns none of it.
  Interval owned_in_slice(int64_t index, int rank) const;

 private:
  int world_size_;
  int64_t slice_numel_ = 0;
  std::vector<Interval> intervals_;
};

/// The gradients of some parameters of a flat group: parameter after parameter,
/// in layout order and with the layout's alignment, so that with all parameters
/// it is the layout, up to its end. Since ranks own consecutive slices, each
/// rank's part is again one interval.
///
/// Members that take an `index` or a `rank` throw std::invalid_argument when
/// it is outside the layout.
class CompactLayout {
 public:
  /// `active[i]`: whether parameter i takes part.
  /// Throws std::invalid_argument unless active.size() == layout.size().
  CompactLayout(const FlatLayout& layout, const std::vector<bool>& active);

  /// Elements of all parameters that take part, and their padding.
  int64_t numel() const { return cuts_.back(); }

  /// Where parameter `index` lies. One that takes no part has an empty
  /// interval at the place where it would start.
  Interval interval(int64_t index) const;

  /// world_size() + 1 offsets: rank r's part is [cuts()[r], cuts()[r + 1]).
  const std::vector<int64_t>& cuts() const { return cuts_; }

  /// The part of parameter `index` that `rank` owns, relative to the first
  /// element of the rank's part; [0, 0) when it owns none of it or the
  /// parameter takes no part.
  Interval owned_in_part(int64_t index, int rank) const;

 private:
  std::vector<Interval> intervals_;
  std::vector<int64_t> cuts_;
};

} // namespace fsdp::detail
