#pragma once

#include "comm/call.h"

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::detail {

class ThreadGroup;

/// One collective of a ThreadGroup. Once all ranks have arrived nothing but
/// `children` changes, so that results are computed without a lock.
struct Operation {
  struct Contribution {
    bool present = false;
    std::vector<std::byte> bytes;
  };

  uint64_t number = 0;
  Call call; // as the rank `first_rank` described it
  int first_rank = 0;
  int arrived = 0;
  std::vector<Contribution> contributions;              // by rank
  std::map<int, std::shared_ptr<ThreadGroup>> children; // split: by color
};

/// The collectives between two failures. [Note: Epochs of a thread group]
///
/// Every rank counts its own epochs and, from 0 in each, its calls; calls of
/// the same epoch and number form an operation. A failure sets the epoch's
/// limit: the number of the first operation that can not become complete, for
/// a rank that signals a failure the number of calls that it has made. What is
/// below the limit still becomes complete, so a step that the failed rank had
/// finished ends well on all ranks. A further failure may lower the limit, but
/// the text of the first stays.
///
/// A rank leaves the epoch when it fails itself, or throws the failure at an
/// operation from the limit on. So it leaves once, has by then made all calls
/// below the limit, and can not leave before the failure is known. A rank that
/// is ahead may fail again, or issue calls, in epochs that the others have not
/// reached: they find these when they arrive. An epoch is forgotten when no
/// rank is in it or before it; handles keep it for its text.
struct Epoch {
  static constexpr uint64_t kNoLimit = UINT64_MAX;

  uint64_t number = 0;
  uint64_t limit = kNoLimit;
  std::string failure; // set with the limit
  // By number. Only those that wait for a rank's call: once all have arrived,
  // the handles alone keep an operation.
  std::map<uint64_t, std::shared_ptr<Operation>> operations;
};

/// What the communicators of a world of threads share. All methods may be
/// called by all ranks at once.
class ThreadGroup {
 public:
  /// One rank's hold on a call.
  struct Ticket {
    int rank = 0;
    std::shared_ptr<Epoch> epoch;
    std::shared_ptr<Operation> operation;
  };

  ThreadGroup(int size, std::chrono::milliseconds timeout);

  int size() const { return static_cast<int>(members_.size()); }

  std::chrono::milliseconds timeout() const { return timeout_; }

  /// Publishes the contribution of `rank` to its next operation. Never waits.
  /// Throws CommunicationError when the rank's epoch ends before it.
  Ticket issue(int rank, const Call& call, std::vector<std::byte> contribution);

  /// Whether await() would not wait.
  bool ready(const Ticket& ticket) const;

  /// Returns when all ranks have arrived at the operation; throws
  /// CommunicationError when that will not be, or not in time.
  void await(const Ticket& ticket);

  /// The group of all that split with this color; the first to ask makes it.
  std::shared_ptr<ThreadGroup>
  child(const Ticket& ticket, int color, int child_size);

  uint64_t epoch(int rank) const;

  /// Ends the epoch of `rank`; its peers throw `failure`.
  void end_epoch(int rank, std::string failure);

  /// Says that `rank` will call nothing any more: who waits for it fails after
  /// `grace`, or as soon as end_epoch() tells the reason.
  void leave(int rank, std::chrono::milliseconds grace);

 private:
  using Clock = std::chrono::steady_clock;

  struct Member {
    uint64_t epoch = 0;
    uint64_t sequence = 0;
    std::optional<Clock::time_point> gone_from; // set when it leaves
  };

  Member& member(int rank);
  std::shared_ptr<Epoch> epoch_of(const Member& member);
  void publish(const Ticket& ticket, std::vector<std::byte> contribution);
  void fail(Epoch& epoch, uint64_t limit, std::string failure);
  void go_on(int rank);
  void forget_epochs();
  bool has_ended(const Ticket& ticket) const;
  bool is_settled(const Ticket& ticket) const;
  /// When who waits for `operation` need not wait any longer because a rank has
  /// left without it; far away when none has.
  Clock::time_point gone_from(const Operation& operation) const;
  std::string missing_text(const Ticket& ticket) const;

  const std::chrono::milliseconds timeout_;
  mutable std::mutex mutex_; // guards all below, and what tickets point to
  std::condition_variable changed_;
  std::vector<Member> members_; // by rank; their number never changes
  std::map<uint64_t, std::shared_ptr<Epoch>> epochs_; // by number
};

} // namespace fsdp::detail
