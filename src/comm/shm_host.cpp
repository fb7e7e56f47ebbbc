#include "comm/shm_host.h"

#include <fsdp/communicator.h>

#include <stdexcept>
#include <thread>
#include <utility>

namespace fsdp::detail {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

size_t rounded_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
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
}

ShmHost::~ShmHost() {
  leave();
}

size_t ShmHost::first_offset() const {
  return rounded_up(sizeof(ShmSegmentHeader), kPage);
}

size_t ShmHost::allocate(size_t bytes) {
  bytes = rounded_up(bytes, kPage);
  {
    const std::lock_guard lock(mutex_);
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
  }
  // Large ranges could get large pages.
  const size_t wanted = bytes + (bytes >= kHugePage ? kHugePage - kPage : 0);
  const size_t begin =
      first_offset() + first_bytes_ + header().used_bytes.fetch_add(wanted);
  if (begin + wanted > segment_->bytes()) {
    throw CommunicationError(
        "shared memory: " + std::to_string(bytes) +
        " bytes of address space are wanted, but all " +
        std::to_string(segment_->bytes()) +
        " are in use. Is the address space limited (ulimit -v)?");
  }
  return bytes >= kHugePage ? rounded_up(begin, kHugePage) : begin;
}

void ShmHost::free(size_t offset, size_t bytes) {
  if (segment_->forked()) {
    return;
  }
  bytes = rounded_up(bytes, kPage);
  segment_->release(offset, bytes);
  const std::lock_guard lock(mutex_);
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

void ShmHost::abort(const std::string& reason) {
  uint32_t expected = ShmSegmentHeader::kRunning;
  if (header().abort_state.compare_exchange_strong(
          expected, ShmSegmentHeader::kBeingWritten)) {
    header().abort_text.store(reason);
    header().abort_state = ShmSegmentHeader::kAborted;
  }
}

std::string ShmHost::aborted() const {
  if (segment_->forked()) {
    return "this process is a fork of a rank; only the rank itself can "
           "communicate";
  }
  const uint32_t state = header().abort_state.load();
  // Who writes the text may die meanwhile; it is then empty or torn.
  return state == ShmSegmentHeader::kRunning
      ? std::string()
      : "the ranks were aborted: " + header().abort_text.load();
}

void ShmHost::leave() {
  if (!segment_->forked()) {
    header().left[static_cast<size_t>(segment_->rank())] = 1;
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
