#include "layout/box.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace fsdp::detail {
namespace {

std::string to_string(std::span<const int64_t> sizes) {
  std::string text = "[";
  for (const int64_t size : sizes) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + "]";
}

int64_t checked_numel(std::span<const int64_t> sizes) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  bool has_zero = false;
  bool overflows = false;
  int64_t numel = 1;
  for (const int64_t size : sizes) {
    if (size < 0) {
      throw std::invalid_argument(
          "boxes_of: a size of the shape " + to_string(sizes) +
          " is negative: expected at least 0, but got " + std::to_string(size) +
          ". Pass the shape of the whole array.");
    }
    has_zero = has_zero || size == 0;
    overflows = overflows || (size > 0 && numel > kMax / size);
    numel = overflows ? kMax : numel * std::max<int64_t>(size, 1);
  }
  if (has_zero) {
    return 0;
  }
  if (overflows) {
    throw std::invalid_argument(
        "boxes_of: the array is too large: expected at most " +
        std::to_string(kMax) + " elements, but got the shape " +
        to_string(sizes) + ". Pass the shape of the whole array.");
  }
  return numel;
}

// The box of the `numel` elements from `begin`, which are whole entries of
// dimension `dim` and lie in one entry of dimension `dim - 1`.
Box box_at(
    int64_t begin,
    int64_t numel,
    size_t dim,
    std::span<const int64_t> sizes,
    std::span<const int64_t> strides) {
  Box box{
      std::vector<int64_t>(sizes.size(), 0),
      std::vector<int64_t>(sizes.begin(), sizes.end())};
  for (size_t d = 0; d <= dim; ++d) {
    box.offsets[d] = begin / strides[d] % sizes[d];
    box.sizes[d] = d < dim ? 1 : numel / strides[d];
  }
  return box;
}

} // namespace

int64_t Box::numel() const {
  int64_t product = 1;
  for (const int64_t size : sizes) {
    product *= size;
  }
  return product;
}

std::vector<Box> boxes_of(Interval interval, std::span<const int64_t> sizes) {
  const int64_t total = checked_numel(sizes);
  if (interval.begin < 0 || interval.end < interval.begin ||
      interval.end > total) {
    throw std::invalid_argument(
        "boxes_of: the interval does not lie inside the array of shape " +
        to_string(sizes) + ": expected part of [0, " + std::to_string(total) +
        "), but got [" + std::to_string(interval.begin) + ", " +
        std::to_string(interval.end) +
        "). Pass elements counted from the array's first.");
  }
  if (interval.empty()) {
    return {};
  }
  if (sizes.empty()) {
    return {Box{}};
  }
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size() - 1; d > 0; --d) {
    strides[d - 1] = strides[d] * sizes[d];
  }

  // Take whole entries of the outermost dimension that has one here. The
  // dimension moves outward while entries are completed, then inward through
  // what is left: each is used at most twice, the outermost at most once.
  std::vector<Box> boxes;
  int64_t begin = interval.begin;
  while (begin < interval.end) {
    const int64_t rest = interval.end - begin;
    size_t dim = 0;
    while (begin % strides[dim] != 0 || rest < strides[dim]) {
      ++dim;
    }
    const int64_t index = begin / strides[dim] % sizes[dim];
    const int64_t count = std::min(sizes[dim] - index, rest / strides[dim]);
    const int64_t numel = count * strides[dim];
    boxes.push_back(box_at(begin, numel, dim, sizes, strides));
    begin += numel;
  }
  return boxes;
}

Box intersect(const Box& a, const Box& b) {
  if (a.sizes.size() != b.sizes.size()) {
    throw std::invalid_argument(
        "intersect: the boxes are not of one array: expected " +
        std::to_string(a.sizes.size()) + " dimensions, but got " +
        std::to_string(b.sizes.size()) + ". Pass boxes of the same array.");
  }
  Box common;
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    const Interval part = intersect(
        Interval{a.offsets[d], a.offsets[d] + a.sizes[d]},
        Interval{b.offsets[d], b.offsets[d] + b.sizes[d]});
    common.offsets.push_back(part.begin);
    common.sizes.push_back(part.numel());
  }
  return common;
}

} // namespace fsdp::detail
