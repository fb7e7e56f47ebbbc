#include "layout/flat_layout.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace fsdp::detail {
namespace {

// Half of the range: the slices exceed the last end by less than
// world_size * kAlignmentNumel, which always fits into the other half.
constexpr int64_t kMaxEnd = int64_t{1} << 62;

int64_t align_up(int64_t numel) {
  return (numel + kAlignmentNumel - 1) / kAlignmentNumel * kAlignmentNumel;
}

size_t
checked(const char* who, const char* what, int64_t value, int64_t count) {
  if (value < 0 || value >= count) {
    throw std::invalid_argument(
        std::string(who) + ": the " + what +
        " is out of range: expected at least 0 and less than " +
        std::to_string(count) + ", but got " + std::to_string(value) +
        ". Pass a " + what + " of this layout.");
  }
  return static_cast<size_t>(value);
}

void check_numel(size_t index, int64_t numel, int64_t begin) {
  if (numel < 0) {
    throw std::invalid_argument(
        "FlatLayout: the element count of parameter " + std::to_string(index) +
        " is negative: expected at least 0, but got " + std::to_string(numel) +
        ". Pass the number of elements of each parameter.");
  }
  if (numel > kMaxEnd - begin) {
    throw std::invalid_argument(
        "FlatLayout: the element count of parameter " + std::to_string(index) +
        " is too large: expected at most " + std::to_string(kMaxEnd - begin) +
        " after the parameters before it, but got " + std::to_string(numel) +
        ". Split the parameters into several groups.");
  }
}

// `interval` relative to `origin`, or [0, 0) when it is empty.
Interval relative_to(int64_t origin, Interval interval) {
  if (interval.empty()) {
    return {};
  }
  return {interval.begin - origin, interval.end - origin};
}

} // namespace

Interval intersect(Interval a, Interval b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

FlatLayout::FlatLayout(std::span<const int64_t> numels, int world_size)
    : world_size_(world_size) {
  if (world_size < 1) {
    throw std::invalid_argument(
        "FlatLayout: the world size is too small: expected at least 1, but "
        "got " +
        std::to_string(world_size) + ". Pass the number of ranks.");
  }
  intervals_.reserve(numels.size());
  int64_t end = 0;
  for (const int64_t numel : numels) {
    const int64_t begin = align_up(end);
    check_numel(intervals_.size(), numel, begin);
    end = begin + numel;
    intervals_.push_back({begin, end});
  }
  slice_numel_ = align_up((end + world_size - 1) / world_size);
}

Interval FlatLayout::interval(int64_t index) const {
  return intervals_[checked("FlatLayout", "parameter index", index, size())];
}

Interval FlatLayout::slice(int rank) const {
  checked("FlatLayout", "rank", rank, world_size_);
  const int64_t begin = rank * slice_numel_;
  return {begin, begin + slice_numel_};
}

Interval FlatLayout::owned_of_parameter(int64_t index, int rank) const {
  const Interval whole = interval(index);
  return relative_to(whole.begin, intersect(whole, slice(rank)));
}

Interval FlatLayout::owned_in_slice(int64_t index, int rank) const {
  const Interval part = slice(rank);
  return relative_to(part.begin, intersect(interval(index), part));
}

CompactLayout::CompactLayout(
    const FlatLayout& layout,
    const std::vector<bool>& active) {
  if (static_cast<int64_t>(active.size()) != layout.size()) {
    throw std::invalid_argument(
        "CompactLayout: the number of flags differs from that of the "
        "parameters: expected " +
        std::to_string(layout.size()) + ", but got " +
        std::to_string(active.size()) + ". Pass one flag per parameter.");
  }
  intervals_.reserve(active.size());
  int64_t end = 0;
  for (int64_t i = 0; i < layout.size(); ++i) {
    const int64_t begin = align_up(end);
    end = begin +
        (active[static_cast<size_t>(i)] ? layout.interval(i).numel() : 0);
    intervals_.push_back({begin, end});
  }
  end = align_up(end);

  // Cuts and parameters are both in order, so one walk over each is enough.
  // A cut is never before the parameter found: both are aligned, and the
  // parameter before it ends at the cut or earlier.
  cuts_.reserve(static_cast<size_t>(layout.world_size()) + 1);
  int64_t index = 0;
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    const int64_t cut = layout.slice(rank).begin;
    while (index < layout.size() && layout.interval(index).end <= cut) {
      ++index;
    }
    if (index == layout.size()) {
      cuts_.push_back(end);
      continue;
    }
    const Interval compact = intervals_[static_cast<size_t>(index)];
    const int64_t before = cut - layout.interval(index).begin;
    cuts_.push_back(compact.begin + std::min(before, compact.numel()));
  }
  cuts_.push_back(end);
}

Interval CompactLayout::interval(int64_t index) const {
  const auto size = static_cast<int64_t>(intervals_.size());
  return intervals_[checked("CompactLayout", "parameter index", index, size)];
}

Interval CompactLayout::owned_in_part(int64_t index, int rank) const {
  const auto world_size = static_cast<int64_t>(cuts_.size()) - 1;
  const size_t r = checked("CompactLayout", "rank", rank, world_size);
  const Interval part{cuts_[r], cuts_[r + 1]};
  return relative_to(part.begin, intersect(interval(index), part));
}

} // namespace fsdp::detail
