#pragma once

#include "comm/call.h"
#include "comm/pieces.h"
#include "comm/shm_arena.h"
#include "comm/shm_control.h"
#include "comm/shm_host.h"
#include "comm/stream_copy.h"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::detail {

/// What a rank adds to a call: `size` bytes, of which some may lie in no piece
/// and are zeros, without [skip_begin, skip_end), which only this rank needs.
struct ShmContribution {
  std::vector<Piece> pieces;
  size_t size = 0;
  size_t skip_begin = 0;
  size_t skip_end = 0;
  Stores stores = Stores::kCached;

  size_t shared_bytes() const { return size - (skip_end - skip_begin); }
};

inline ShmContribution contribution_of(
    std::span<const std::byte> bytes,
    Stores stores = Stores::kCached) {
  return {.pieces = {{0, bytes}}, .size = bytes.size(), .stores = stores};
}

/// The contributions to a call, by rank: what others share, and all of the own
/// where it is one piece.
using ShmPayloads = std::vector<std::span<const std::byte>>;

/// A call of this rank. Guarded by its group.
struct ShmOperation {
  Call call;
  std::function<ShmContribution()> contribution;
  std::function<void(const ShmPayloads&)> deliver; // empty: not wanted
  /// The contribution is the result of the call before.
  bool follows = false;

  // Set by the group.
  std::string header = {}; // the encoded call
  uint64_t number = 0;     // in its epoch
  bool contributed = false;
  bool is_over = false;
  std::string failure = {}; // why it has no result, once it is over
};

/// One rank's view of a group of ranks, and the calls that it makes there.
///
/// [Note: Calls in shared memory] Each rank numbers its calls, from 0 in each
/// epoch. To contribute to a call it copies its bytes into its arena, describes
/// them in its line and counts up `contributed`; when all have contributed, a
/// rank takes the result straight from the arenas of the others and counts up
/// `taken`, which frees their blocks. Making a call never waits: where there is
/// no room the contribution follows later: when this rank does something with
/// the group, or sleeps in a wait of any group. Calls are taken in the order in
/// which they were made.
///
/// A failure ends the epoch of a rank: it notes to how many calls it has
/// contributed, and why it ends, and goes on to the next epoch. Peers take the
/// calls below that number, and end their epoch at the first that is not.
///
/// Whoever waits spins for a moment, then yields, then sleeps on its bell. In
/// every tenth of a second it looks whether a process has died.
class ShmGroup {
 public:
  using Operation = std::shared_ptr<ShmOperation>;

  static size_t control_bytes(int size);

  /// `members` are the ranks of the segment that form the group.
  ShmGroup(
      std::shared_ptr<ShmHost> host,
      size_t control_offset,
      std::vector<int> members,
      int rank);
  ~ShmGroup();
  ShmGroup(const ShmGroup&) = delete;
  ShmGroup& operator=(const ShmGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  const std::vector<int>& members() const { return members_; }
  const std::shared_ptr<ShmHost>& host() const { return host_; }

  /// Makes the next call. Never waits. Throws CommunicationError when the epoch
  /// ends before it.
  Operation issue(ShmOperation operation);
  /// Whether wait() would not wait.
  bool ready(const Operation& operation);
  /// Returns when the result is delivered. Throws CommunicationError.
  void wait(const Operation& operation);
  /// The buffers of `operation` go away: runs `detach`, which changes it so
  /// that they are not needed, unless it is over.
  void abandon(const Operation& operation, const std::function<void()>& detach);

  /// Waits until `has_come` is true for all peers, who ring when it becomes so.
  /// A failure that would end the next call ends this wait.
  void await(
      const std::string& title,
      const std::function<bool(int rank)>& has_come);
  /// Wakes who waits for this rank.
  void ring();

  void reserve(size_t bytes);

  /// Throws CommunicationError where no call can succeed any more.
  void check_aborted(const std::string& title) const;
  uint64_t epoch();
  void end_epoch(const std::string& failure);

  /// This rank makes no more calls.
  void leave(ShmGone how);
  /// Whether nobody makes calls any more, nor reads those of this rank.
  bool is_over();

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;
  using HasCome = std::function<bool(int rank)>;

  /// What a rank waits for, for the sake of messages.
  struct Waiting {
    std::string title;
    HasCome has_come;
    Clock::time_point start;
    int peer = 0;       // the first of those that have not come
    uint64_t calls = 0; // that count, should the peer have left
  };

  ShmRankLine& line(int rank) const { return lines_[rank]; }
  ShmRankLine& mine() const { return lines_[rank_]; }

  // What peers have done.
  bool has_passed(int peer, uint64_t epoch, uint64_t call) const;
  bool has_contributed(int peer, uint64_t call) const;
  const ShmEpoch& epoch_of(int peer) const {
    return line(peer).epochs[epoch_ % ShmRankLine::kEpochs];
  }
  /// Of a call to which the peer has contributed.
  const ShmDescriptor& descriptor_of(int peer, uint64_t call) const;
  std::string_view header_of(int peer, uint64_t call) const;
  /// Why `call` will not be complete; empty while it may.
  std::string failure_of(uint64_t call) const;
  std::string difference_at(const ShmOperation& operation) const;
  bool all_have_passed(uint64_t epoch, uint64_t call) const;

  // Calls of this rank.
  bool contribute(ShmOperation& operation);
  /// Contributes to what there is room for. Returns why this rank can not.
  std::string contribute_all();
  void deliver(ShmOperation& operation);
  /// Goes as far as possible without waiting. Returns the failure that it
  /// meets.
  std::string advance();
  /// The same while this rank waits in another group. Returns whether calls are
  /// left.
  bool advance_meanwhile();
  /// What the first call that is not over waits for.
  Waiting waiting_for_first(Clock::time_point start) const;

  // Waiting.
  std::optional<int> first_missing(const HasCome& has_come) const;
  void wait_for(
      Lock& lock,
      const Waiting& waiting,
      const std::function<bool()>& may_go_on);
  void sleep(
      Lock& lock,
      const Waiting& waiting,
      const std::function<bool()>& may_go_on);
  void look_around(const Waiting& waiting);
  bool is_gone_for_good(const Waiting& waiting);
  void check_gone(Lock& lock, const Waiting& waiting);
  std::string describe(int peer) const;
  std::string missing_text(const Waiting& waiting) const;
  void wake(bool all);

  // Failures.
  /// Ends the epoch: only the first `calls` calls of this rank count.
  void go_on(const std::string& failure, uint64_t calls);
  void await_slowest();
  [[noreturn]] void fail(const std::string& failure);

  std::shared_ptr<ShmHost> host_;
  size_t control_offset_;
  std::vector<int> members_; // ranks of the segment
  int rank_;
  ShmRankLine* lines_;

  std::mutex mutex_; // guards all below, and operations
  ShmArena arena_;
  /// Which call each descriptor of this rank is of.
  std::array<std::optional<std::pair<uint64_t, uint64_t>>, ShmRankLine::kCalls>
      described_;
  uint64_t epoch_ = 0;
  uint64_t first_ = 0;                            // contribution of this epoch
  uint64_t made_ = 0;                             // calls of this epoch
  uint64_t contributed_ = 0;                      // of them
  uint64_t taken_ = 0;                            // of them
  std::deque<Operation> operations_;              // made, not taken
  std::map<int, Clock::time_point> noticed_gone_; // peers, and since when
};

} // namespace fsdp::detail
