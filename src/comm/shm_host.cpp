#include "comm/shm_host.h"

#include <fsdp/communicator.h>

#include <stdexcept>
#include <utility>

namespace fsdp::detail {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

size_t rounded_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

[[noreturn]] void throw_no_room(size_t wanted, size_t bytes) {
  throw CommunicationError(
      "shared memory: " + std::to_string(wanted) +
      " bytes of address space are wanted, but not so many of all " +
      std::to_string(bytes) +
      " are left. Is the address space limited (ulimit -v)?");
}

} // namespace

ShmHost::ShmHost(
    std::shared_ptr<ShmSegment> segment,
    std::chrono::milliseconds timeout,
    size_t first_bytes)
    : segment_(std::move(segment)),
      timeout_(timeout),
      first_bytes_(rounded_up(first_bytes, kPage)) {
  constexpr auto kMaxRanks = ShmSegmentHeader::kMaxRanks;
  if (static_cast<size_t>(segment_->size()) > kMaxRanks) {
    throw std::invalid_argument(
        "shared memory: expected at most " + std::to_string(kMaxRanks) +
        " ranks on one host, but got " + std::to_string(segment_->size()));
  }
  if (first_offset() + first_bytes_ > segment_->bytes()) {
    throw_no_room(first_offset() + first_bytes_, segment_->bytes());
  }
}

ShmHost::~ShmHost() {
  leave();
}

size_t ShmHost::first_offset() const {
  return rounded_up(sizeof(ShmSegmentHeader), kPage);
}

size_t ShmHost::allocate(size_t bytes) {
  if (segment_->forked()) {
    throw CommunicationError("shared memory: " + aborted());
  }
  bytes = rounded_up(bytes, kPage);
  const std::lock_guard lock(mutex_);
  take_back_returned();
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    if (range->second >= bytes) {
      const auto [offset, length] = *range;
      free_.erase(range);
      if (length > bytes) {
        free_.emplace(offset + bytes, length - bytes);
      }
      return offset;
    }
  }
  return take_fresh(bytes);
}

size_t ShmHost::take_fresh(size_t bytes) {
  // Large ranges could get large pages.
  const bool is_large = bytes >= kHugePage;
  const size_t wanted = bytes + (is_large ? kHugePage - kPage : 0);
  uint64_t used = header().used_bytes;
  size_t begin = 0;
  do {
    begin = first_offset() + first_bytes_ + used;
    if (wanted > segment_->bytes() - begin) {
      throw_no_room(bytes, segment_->bytes());
    }
  } while (!header().used_bytes.compare_exchange_weak(used, used + wanted));
  return is_large ? rounded_up(begin, kHugePage) : begin;
}

void ShmHost::free(size_t offset, size_t bytes, int owner) {
  if (owner == segment_->rank()) {
    free(offset, bytes);
    return;
  }
  bytes = rounded_up(bytes, kPage);
  if (segment_->forked() || !released(offset, bytes)) {
    return;
  }
  auto& head = header().returned[static_cast<size_t>(owner)];
  auto& range = *at<ShmReturnedRange>(offset);
  range = {.next_offset = head, .bytes = bytes};
  while (!head.compare_exchange_weak(range.next_offset, offset)) {}
}

void ShmHost::free(size_t offset, size_t bytes) {
  bytes = rounded_up(bytes, kPage);
  if (!segment_->forked() && released(offset, bytes)) {
    const std::lock_guard lock(mutex_);
    keep_free(offset, bytes);
  }
}

bool ShmHost::released(size_t offset, size_t bytes) {
  try {
    segment_->release(offset, bytes);
    return true;
  } catch (const CommunicationError&) {
    return false; // not zeros: nobody may have them any more
  }
}

void ShmHost::take_back_returned() {
  uint64_t offset = header().returned[own()].exchange(0);
  while (offset != 0) {
    const auto [next, bytes] = *at<ShmReturnedRange>(offset);
    if (released(offset, kPage)) {
      keep_free(offset, bytes);
    }
    offset = next;
  }
}

void ShmHost::keep_free(size_t offset, size_t bytes) {
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_.emplace(offset, bytes);
}

void ShmHost::add_group(const ShmGroup* group, std::function<bool()> go_on) {
  const std::lock_guard lock(groups_mutex_);
  groups_.emplace(group, std::move(go_on));
}

void ShmHost::remove_group(const ShmGroup* group) {
  const std::lock_guard lock(groups_mutex_);
  groups_.erase(group);
}

bool ShmHost::let_others_go_on(const ShmGroup* waiting) {
  const std::lock_guard lock(groups_mutex_);
  bool any = false;
  for (const auto& [group, go_on] : groups_) {
    any = (group != waiting && go_on()) || any;
  }
  return any;
}

void ShmHost::abort(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (header().aborted_by == 0) {
    header().abort_texts[own()].store(reason); // nobody reads it before
    uint32_t nobody = 0;
    header().aborted_by.compare_exchange_strong(
        nobody, static_cast<uint32_t>(own()) + 1);
  }
}

std::string ShmHost::aborted() const {
  if (segment_->forked()) {
    return "this process is a fork of a rank; only the rank itself can "
           "communicate";
  }
  const uint32_t by = header().aborted_by;
  return by == 0
      ? std::string()
      : "the ranks were aborted: " + header().abort_texts[by - 1].load();
}

void ShmHost::leave() {
  if (!segment_->forked()) {
    header().left[own()] = 1;
  }
}

bool ShmHost::has_left(int rank) const {
  return header().left[static_cast<size_t>(rank)] != 0;
}

std::optional<int> ShmHost::dead_rank() const {
  for (int r = 0; r < segment_->size(); ++r) {
    // A rank that leaves does so before it ends.
    if (r != segment_->rank() && segment_->is_dead(r) && !has_left(r)) {
      return r;
    }
  }
  return std::nullopt;
}

} // namespace fsdp::detail
