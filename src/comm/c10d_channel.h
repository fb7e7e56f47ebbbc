#pragma once

#include "comm/c10d_marks.h"
#include "comm/c10d_records.h"
#include "comm/c10d_world.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fsdp::detail {

/// The calls of one communicator. [Note: Epochs over c10d]
///
/// As in [Note: Epochs of a thread group] every rank counts its epochs and,
/// from 0 in each, its calls. A failed rank writes a record into the store: the
/// number of calls that it has made is the limit, what is below it still
/// becomes complete. Peers that wait look there every few milliseconds; the
/// text of the epoch's first record is thrown by all.
///
/// Calls that were given up can not be taken out of a back end, so that every
/// epoch has a group of its own. All ranks must come to make it, at different
/// times and perhaps each waiting for the others in another communicator:
/// therefore it is made in the background from the moment at which the rank
/// leaves the epoch before, and calls wait in the group's list. The old group
/// is kept until the new one is made, since then all ranks have left it.
///
/// Works use the caller's memory where they can be stopped. A rank that leaves
/// with such a work in flight waits a moment for its peers, then breaks the
/// group off: a peer whose call fails by that looks for the record first.
///
/// A rank may leave the channel while others still wait for it, for instance
/// because of an exception. It says so in the store before its connections
/// close. A peer whose call fails then gives it a moment to tell why, which it
/// may do in a communicator above this one, and ends the epoch; the world goes
/// on.
class C10dChannel {
 public:
  /// Who takes part.
  struct Members {
    std::vector<int> world_ranks = {}; // by rank here
    int rank = 0;

    int size() const { return static_cast<int>(world_ranks.size()); }
  };

  struct Epoch {
    static constexpr uint64_t kNoLimit = UINT64_MAX;

    uint64_t number = 0;
    uint64_t limit = kNoLimit;
    std::string failure;  // set with the limit
    uint64_t records = 0; // that were read
    bool has_left = false;
    std::shared_ptr<C10dGroup> group;
  };

  /// A call that was made.
  struct Ticket {
    std::shared_ptr<Epoch> epoch;
    std::shared_ptr<C10dOperation> operation;
  };

  /// `name` is the same on all its ranks and no other's. A null `group`: it
  /// makes its own.
  C10dChannel(
      std::shared_ptr<C10dWorld> world,
      std::string name,
      Members members,
      std::shared_ptr<C10dGroup> group);

  C10dChannel(const C10dChannel&) = delete;
  C10dChannel& operator=(const C10dChannel&) = delete;

  C10dWorld& world() const { return *world_; }

  const std::string& name() const { return name_; }

  const Members& members() const { return members_; }

  /// Makes the next call. Throws CommunicationError when its epoch has ended,
  /// or the world.
  Ticket issue(C10dPlan plan);

  /// Whether await() would not wait.
  bool ready(const Ticket& ticket);

  /// Returns when the call is complete; throws CommunicationError when that
  /// will not be, or not in time.
  void await(const Ticket& ticket);

  /// The caller waits no more, and its memory may go away.
  void release(const Ticket& ticket);

  uint64_t epoch();

  /// Ends this rank's epoch; the peers throw `failure`. Throws nothing. Works
  /// also after leave().
  void end_epoch(const std::string& failure);

  /// This rank makes no more calls. Waits for no peer.
  void leave();

  bool has_left();

  /// A channel over some of the ranks, by their ranks here; `ticket` is that of
  /// the split.
  std::shared_ptr<C10dChannel> make_child(
      const Ticket& ticket,
      int color,
      const std::vector<int>& ranks,
      int rank);

 private:
  std::shared_ptr<Epoch> current_epoch();
  void make_group(Epoch& epoch, std::shared_ptr<C10dGroup> previous);
  void throw_if_forked() const;
  std::string who_calls(const Call& call) const;
  bool try_finish(const Ticket& ticket);
  void throw_if_ended(const Ticket& ticket);
  void look(Epoch& epoch, const std::string& who);
  void look_for(
      const std::vector<int>& waiting_for,
      Epoch& epoch,
      const std::string& who);
  void look_sometimes(Epoch& epoch, const std::string& who);
  void read_records(Epoch& epoch);
  void write_record(const Epoch& epoch, const FailureRecord& record);
  void fail_epoch(Epoch& epoch, const FailureRecord& record);
  void leave_locked(Epoch& epoch);
  [[noreturn]] void give_up_call(const Ticket& ticket);
  void throw_if_peer_has_left(const Ticket& ticket);
  [[noreturn]] void end_in_time_out(const Ticket& ticket);
  [[noreturn]] void end_world(const Ticket& ticket, const std::string& reason);
  WaitMark mark_of(const Ticket& ticket);
  void compare_marks(const Ticket& ticket);
  std::string time_out_text(const Ticket& ticket);

  const std::shared_ptr<C10dWorld> world_;
  const std::string name_;
  const Members members_;
  const C10dStorePtr store_; // of this channel
  const bool owns_group_;
  C10dMarks marks_;
  std::chrono::steady_clock::time_point last_look_; // of look_sometimes()
  std::mutex mutex_; // guards what follows: a parent may fail at any time
  std::shared_ptr<Epoch> epoch_;
  uint64_t calls_ = 0; // made in this epoch
  bool has_left_ = false;
};

} // namespace fsdp::detail
