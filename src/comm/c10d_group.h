#pragma once

#include "comm/c10d_operation.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::detail {

/// A back end over the ranks of a communicator, and the calls that run on it,
/// in the order in which they are added. All methods may be called by any
/// thread; none waits but make(), finish() and close().
///
/// A call starts when all steps of those before it have been started, so that
/// the collectives of the back end come in one order on all ranks, whatever
/// these wait for first. Whoever looks at a call drives all of them.
class C10dGroup {
 public:
  /// How a group gets its back end.
  struct Making {
    C10dStorePtr store = {}; // for this group alone; its own connection
    C10dBackendFactory factory = {};
    std::function<bool()> is_over = {}; // whether nobody needs it any more
    std::shared_ptr<C10dGroup> previous = {};    // of the epoch before, or null
    std::function<bool(int rank)> has_left = {}; // and will not come; or empty
  };

  C10dGroup(int rank, int size, std::chrono::milliseconds timeout);

  /// In a forked child it leaves the back end alone: its sockets and threads
  /// are the parent's.
  ~C10dGroup();

  C10dGroup(const C10dGroup&) = delete;
  C10dGroup& operator=(const C10dGroup&) = delete;

  /// Waits until all ranks have come, and connects to them. Then no rank needs
  /// the previous group, and it is closed. Errors become those of the calls. A
  /// group that is closed before this rank comes is not made.
  void make(const Making& making);

  /// Uses a back end of the program.
  void adopt(C10dBackendPtr backend);

  void add(const std::shared_ptr<C10dOperation>& operation);

  /// The state of one call.
  C10dOperation::State poll(C10dOperation& operation);

  void pump();

  /// Whether make() is over, well or not.
  bool is_settled() const;

  /// The ranks that have not come yet, while it is made.
  std::vector<int> not_arrived() const;

  /// The first of the calls that are not complete, by number.
  std::vector<std::pair<uint64_t, Call>> open_calls(size_t limit) const;

  /// Whether a call below `limit` is not complete.
  bool has_open_call_below(uint64_t limit) const;

  /// The ranks to which the connection is lost, where the back end can tell.
  std::vector<int> lost_ranks();

  /// Ends what is in flight and everything that is added later; the calls fail
  /// with `reason` or an error of the back end.
  void break_off(const std::string& reason);

  /// Waits until all its calls are complete, or `is_over`.
  void finish(const std::function<bool()>& is_over);

  /// Breaks off what is in flight, and gives the back end up.
  void close();

 private:
  bool all_have_come(c10d::Store& store);
  void throw_if_one_has_left(const Making& making) const;
  bool await_arrivals(const Making& making);
  bool is_broken() const;
  void attach(C10dBackendPtr backend);
  void fail_all(const std::string& reason);
  void pump_locked();

  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  const uint64_t generation_; // of forks
  mutable std::mutex mutex_;  // guards all below, and the operations
  std::unique_ptr<C10dTransport> transport_;
  std::string broken_; // why no call can start; empty while all is well
  bool is_made_ = false;
  std::vector<bool> arrived_; // by rank
  std::list<std::shared_ptr<C10dOperation>> waiting_;
  std::list<std::shared_ptr<C10dOperation>> started_; // all their steps
};

} // namespace fsdp::detail
