// How calls of a C10dChannel end.

#include "comm/c10d_channel.h"
#include "comm/c10d_wait.h"

#include <algorithm>
#include <thread>

namespace fsdp::detail {
namespace {

using ChannelState = C10dOperation::State;

// How long a failure may take to be told after its effects are seen.
constexpr std::chrono::milliseconds kTelling(1000);
// How long a rank that gives a call up lets its peers come to it.
constexpr std::chrono::milliseconds kFarewell(2000);

/// Takes the mark of a wait away when that ends. The last mark of a world that
/// has ended stays, for those that ask why.
class MarkOfWait {
 public:
  MarkOfWait(C10dMarks& marks, const C10dWorld& world)
      : marks_(marks),
        world_(world) {}

  ~MarkOfWait() {
    if (world_.aborted().empty()) {
      marks_.erase();
    }
  }

  MarkOfWait(const MarkOfWait&) = delete;
  MarkOfWait& operator=(const MarkOfWait&) = delete;

 private:
  C10dMarks& marks_;
  const C10dWorld& world_;
};

} // namespace

void C10dChannel::await(const Ticket& ticket) {
  throw_if_forked();
  const MarkOfWait mark(marks_, *world_);
  C10dWait wait(world_->options().timeout);
  while (!try_finish(ticket)) {
    if (wait.look_is_due()) {
      look(*ticket.epoch, who_calls(ticket.operation->call()));
    }
    if (wait.mark_is_due()) {
      compare_marks(ticket);
    }
    if (wait.is_over()) {
      end_in_time_out(ticket);
    }
    wait.pause();
  }
}

bool C10dChannel::try_finish(const Ticket& ticket) {
  const ChannelState state = ticket.epoch->group->poll(*ticket.operation);
  {
    const std::lock_guard lock(mutex_);
    if (state == ChannelState::kDone && !ticket.epoch->has_left) {
      return true;
    }
  }
  throw_if_ended(ticket);
  if (state == ChannelState::kFailed) {
    give_up_call(ticket);
  }
  return false;
}

void C10dChannel::throw_if_ended(const Ticket& ticket) {
  Epoch& epoch = *ticket.epoch;
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    if (epoch.has_left || ticket.operation->number() >= epoch.limit) {
      text = epoch.failure;
      leave_locked(epoch);
    } else if (const auto reason = world_->aborted(); !reason.empty()) {
      text = "aborted: " + reason;
    }
  }
  if (!text.empty()) {
    release(ticket);
    throw CommunicationError(text);
  }
}

// An error of the back end may be the consequence of a failure that is about to
// be told, here or on another rank.
void C10dChannel::give_up_call(const Ticket& ticket) {
  Epoch& epoch = *ticket.epoch;
  const C10dOperation& operation = *ticket.operation;
  const std::string who = who_calls(operation.call());
  if (operation.is_mismatch()) {
    fail_epoch(epoch, {operation.number(), operation.error()});
  }
  C10dWait wait(kTelling);
  do {
    look_for(members_.world_ranks, epoch, who); // one may have left
    {
      const std::lock_guard lock(mutex_);
      if (epoch.limit != Epoch::kNoLimit) {
        epoch.limit = std::min(epoch.limit, operation.number());
      }
    }
    throw_if_ended(ticket);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  } while (!wait.is_over());
  throw_if_peer_has_left(ticket);
  end_world(ticket, "the back end failed " + who + ": " + operation.error());
}

// A peer may have said in the last moment why it does not come.
void C10dChannel::end_in_time_out(const Ticket& ticket) {
  look(*ticket.epoch, who_calls(ticket.operation->call()));
  throw_if_ended(ticket);
  end_world(ticket, time_out_text(ticket));
}

void C10dChannel::end_world(const Ticket& ticket, const std::string& reason) {
  world_->abort(reason);
  release(ticket);
  const auto first = world_->aborted();
  throw CommunicationError(first == reason ? reason : "aborted: " + first);
}

void C10dChannel::release(const Ticket& ticket) {
  C10dGroup& group = *ticket.epoch->group;
  C10dOperation& operation = *ticket.operation;
  if (!operation.borrows() || world_->forked()) {
    return; // it may go on
  }
  const auto is_needed = [&] { // by peers, as far as they have told
    const std::lock_guard lock(mutex_);
    return world_->aborted().empty() &&
        group.has_open_call_below(ticket.epoch->limit);
  };
  constexpr std::chrono::milliseconds kPause(1);
  C10dWait wait(kFarewell);
  while (group.poll(operation) == ChannelState::kUnfinished && is_needed() &&
         !wait.is_over()) {
    if (wait.look_is_due()) {
      look(*ticket.epoch, who_calls(operation.call()));
    }
    std::this_thread::sleep_for(kPause);
  }
  if (group.poll(operation) == ChannelState::kUnfinished) {
    group.break_off(
        "a call was given up before it was complete " +
        who_calls(operation.call()));
  }
  while (group.poll(operation) == ChannelState::kUnfinished) {
    std::this_thread::sleep_for(kPause);
  }
}

std::string C10dChannel::who_calls(const Call& call) const {
  return "by " + rank_text(members_.rank, members_.size()) + " in " +
      title_of(call.kind, call.what);
}

// As the peers read it, with long texts cut off.
WaitMark C10dChannel::mark_of(const Ticket& ticket) {
  constexpr size_t kCalls = 8;
  WaitMark mark{
      .channel = name_,
      .epoch = ticket.epoch->number,
      .waits_for = ticket.operation->number(),
      .open_calls = ticket.epoch->group->open_calls(kCalls)};
  {
    const std::lock_guard lock(mutex_);
    mark.calls = calls_;
  }
  return decode_mark(encode(mark));
}

void C10dChannel::compare_marks(const Ticket& ticket) {
  try {
    const WaitMark mine = mark_of(ticket);
    marks_.write(mine);
    if (const auto difference = marks_.difference(mine)) {
      const std::lock_guard lock(mutex_);
      fail_epoch(*ticket.epoch, {difference->first, difference->second});
    }
  } catch (...) {
    world_->lose_store(
        who_calls(ticket.operation->call()), std::current_exception());
  }
}

std::string C10dChannel::time_out_text(const Ticket& ticket) {
  const Call& call = ticket.operation->call();
  std::string missing = "unknown, as there is no store to tell";
  try {
    if (world_->options().store != nullptr) {
      missing = marks_.missing(mark_of(ticket));
    }
  } catch (...) {
    missing = "unknown: " + c10d_text_of(std::current_exception());
  }
  return title_of(call.kind, call.what) + ": " +
      rank_text(members_.rank, members_.size()) + " timed out after " +
      std::to_string(world_->options().timeout.count()) +
      " ms; not arrived: " + missing +
      ". Look for an error or a different path there, or raise the time limit "
      "if it is only slow.";
}

} // namespace fsdp::detail
