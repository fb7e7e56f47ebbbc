#pragma once

#include "comm/shm_control.h"
#include "comm/shm_segment.h"

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace fsdp::detail {

class ShmGroup;

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
  /// Gives back what rank `owner` has allocated, once nobody uses it: the
  /// memory to the system, the addresses to that rank, who may want as many
  /// again.
  void free(size_t offset, size_t bytes, int owner);
  /// The same for what this rank has allocated.
  void free(size_t offset, size_t bytes);

  template <class T = std::byte>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(segment_->data() + offset);
  }

  /// A group of this rank. `go_on` takes it as far as possible without waiting,
  /// and says whether it has calls that are not over.
  void add_group(const ShmGroup* group, std::function<bool()> go_on);
  void remove_group(const ShmGroup* group);
  /// Lets all groups but `waiting` go on: what a peer waits for in one of them
  /// must not wait until this rank has what it waits for in another. Returns
  /// whether any has calls that are not over.
  bool let_others_go_on(const ShmGroup* waiting);

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
  size_t own() const { return static_cast<size_t>(segment_->rank()); }
  /// Addresses that nobody has had so far.
  size_t take_fresh(size_t bytes);
  /// Gives the memory to the system. Returns whether that was possible.
  bool released(size_t offset, size_t bytes);
  void take_back_returned();
  void keep_free(size_t offset, size_t bytes);

  std::shared_ptr<ShmSegment> segment_;
  std::chrono::milliseconds timeout_;
  size_t first_bytes_;
  std::mutex mutex_; // guards free_, and this rank's text of why it aborts
  std::map<size_t, size_t> free_; // offset to bytes; never adjacent
  std::mutex groups_mutex_;       // taken before those of groups; guards
  std::map<const ShmGroup*, std::function<bool()>> groups_;
};

} // namespace fsdp::detail
