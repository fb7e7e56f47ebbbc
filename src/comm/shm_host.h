#pragma once

#include "comm/shm_control.h"
#include "comm/shm_segment.h"

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace fsdp::detail {

/// This process among those of a segment: address space for groups and
/// buffers, and the end of all when one dies. May be used by several threads.
class ShmHost {
 public:
  /// `first_bytes` at first_offset() belong to all from the start.
  ShmHost(
      std::shared_ptr<ShmSegment> segment,
      std::chrono::milliseconds timeout,
      size_t first_bytes);
  /// The others learn that this process has left.
  ~ShmHost();
  ShmHost(const ShmHost&) = delete;
  ShmHost& operator=(const ShmHost&) = delete;

  ShmSegment& segment() const { return *segment_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  size_t first_offset() const;

  /// Whole pages of zeros, that no other rank gets. Returns their offset.
  size_t allocate(size_t bytes);
  /// Gives back what was allocated, by any rank, once nobody uses it.
  void free(size_t offset, size_t bytes);

  template <class T = std::byte>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(segment_->data() + offset);
  }

  /// Makes all ranks throw `reason`, if nobody was quicker.
  void abort(const std::string& reason);
  /// Why the ranks are to throw; empty while all is well.
  std::string aborted() const;

  /// This process calls nothing any more.
  void leave();
  bool has_left(int rank) const;

  /// Whether a rank is dead that has not left before, and which.
  std::optional<int> dead_rank() const;

 private:
  ShmSegmentHeader& header() const { return *at<ShmSegmentHeader>(0); }

  std::shared_ptr<ShmSegment> segment_;
  std::chrono::milliseconds timeout_;
  size_t first_bytes_;
  std::mutex mutex_; // guards free_
  std::map<size_t, size_t> free_; // offset to bytes; never adjacent
};

} // namespace fsdp::detail
