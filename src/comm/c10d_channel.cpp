#include "comm/c10d_channel.h"

#include "comm/c10d_wait.h"

#include <algorithm>
#include <numeric>
#include <thread>
#include <utility>

namespace fsdp::detail {
namespace {

using State = C10dOperation::State;

// How long a failure may take to be told after its effects are seen.
constexpr std::chrono::milliseconds kTelling(1000);
// How long a rank that gives a call up lets its peers come to it.
constexpr std::chrono::milliseconds kFarewell(2000);

std::string records_key(uint64_t epoch) {
  return "epoch" + std::to_string(epoch) + "/failures";
}

std::string record_key(uint64_t epoch, uint64_t index) {
  return records_key(epoch) + "/" + std::to_string(index);
}

} // namespace

C10dChannel::C10dChannel(
    std::shared_ptr<C10dWorld> world,
    std::string name,
    Members members,
    std::shared_ptr<C10dGroup> group)
    : world_(std::move(world)),
      name_(std::move(name)),
      members_(std::move(members)),
      store_(world_->store_at(name_)),
      owns_group_(group == nullptr),
      marks_(world_->store_at("marks"), members_.world_ranks, members_.rank),
      epoch_(std::make_shared<Epoch>()) {
  epoch_->group = std::move(group);
  if (owns_group_) {
    make_group(*epoch_, nullptr);
  }
}

C10dChannel::~C10dChannel() {
  if (owns_group_) {
    world_->retire(epoch_->group);
  }
}

void C10dChannel::make_group(
    Epoch& epoch,
    std::shared_ptr<C10dGroup> previous) {
  epoch.group = std::make_shared<C10dGroup>(
      members_.rank, members_.size(), world_->options().timeout);
  if (members_.size() == 1) {
    return;
  }
  try {
    world_->make(
        epoch.group,
        name_ + "/group" + std::to_string(epoch.number),
        std::move(previous));
  } catch (...) {
    epoch.group->break_off(c10d_text_of(std::current_exception()));
  }
}

C10dChannel::Ticket C10dChannel::issue(C10dPlan plan) {
  look_sometimes(*current_epoch(), who_calls(plan.call));
  const std::lock_guard lock(mutex_);
  if (const auto reason = world_->aborted(); !reason.empty()) {
    throw CommunicationError("aborted: " + reason);
  }
  if (calls_ >= epoch_->limit) {
    const std::string failure = epoch_->failure;
    leave_locked(*epoch_);
    throw CommunicationError(failure);
  }
  const uint64_t number = calls_++;
  const uint64_t hash = hash_of(plan.call) + number;
  Ticket ticket{
      epoch_, std::make_shared<C10dOperation>(std::move(plan), number, hash)};
  epoch_->group->add(ticket.operation);
  return ticket;
}

bool C10dChannel::ready(const Ticket& ticket) {
  if (ticket.epoch->group->poll(*ticket.operation) != State::kUnfinished) {
    return true;
  }
  look_sometimes(*ticket.epoch, who_calls(ticket.operation->call()));
  const std::lock_guard lock(mutex_);
  return ticket.epoch->has_left || !world_->aborted().empty() ||
      ticket.operation->number() >= ticket.epoch->limit;
}

void C10dChannel::await(const Ticket& ticket) {
  C10dWait wait(world_->options().timeout);
  while (!try_finish(ticket)) {
    if (wait.look_is_due()) {
      look(*ticket.epoch, who_calls(ticket.operation->call()));
    }
    if (wait.mark_is_due()) {
      compare_marks(ticket);
    }
    if (wait.is_over()) {
      end_world(ticket, time_out_text(ticket));
    }
    wait.pause();
  }
}

bool C10dChannel::try_finish(const Ticket& ticket) {
  const State state = ticket.epoch->group->poll(*ticket.operation);
  {
    const std::lock_guard lock(mutex_);
    if (state == State::kDone && !ticket.epoch->has_left) {
      return true;
    }
  }
  throw_if_ended(ticket);
  if (state == State::kFailed) {
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
  end_world(ticket, "the back end failed " + who + ": " + operation.error());
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
  if (!operation.borrows()) {
    return; // it may go on
  }
  const auto is_needed = [&] { // by peers
    const std::lock_guard lock(mutex_);
    return world_->aborted().empty() &&
        (!ticket.epoch->has_left ||
         group.has_open_call_below(ticket.epoch->limit));
  };
  constexpr std::chrono::milliseconds kPause(1);
  C10dWait wait(kFarewell);
  while (group.poll(operation) == State::kUnfinished && is_needed() &&
         !wait.is_over()) {
    std::this_thread::sleep_for(kPause);
  }
  if (group.poll(operation) == State::kUnfinished) {
    group.break_off(
        "a call was given up before it was complete " +
        who_calls(operation.call()));
  }
  while (group.poll(operation) == State::kUnfinished) {
    std::this_thread::sleep_for(kPause);
  }
}

uint64_t C10dChannel::epoch() {
  return current_epoch()->number;
}

std::shared_ptr<C10dChannel::Epoch> C10dChannel::current_epoch() {
  const std::lock_guard lock(mutex_);
  return epoch_;
}

void C10dChannel::end_epoch(const std::string& failure) {
  const std::lock_guard lock(mutex_);
  Epoch& epoch = *epoch_;
  if (members_.size() > 1 && !world_->has_factory()) {
    world_->abort(
        failure +
        ". A world over a single back end can not go on after a failure: give "
        "world_over a factory of back ends instead.");
  }
  fail_epoch(epoch, {calls_, failure});
  leave_locked(epoch);
}

void C10dChannel::fail_epoch(Epoch& epoch, const FailureRecord& record) {
  if (members_.size() > 1 && world_->aborted().empty()) {
    try {
      write_record(epoch, record);
      read_records(epoch);
    } catch (...) {
      world_->abort(
          record.text + ". This could not be told to the other ranks: " +
          c10d_text_of(std::current_exception()));
    }
  }
  if (epoch.limit == Epoch::kNoLimit) {
    epoch.limit = record.limit;
    epoch.failure = record.text;
  }
}

void C10dChannel::write_record(
    const Epoch& epoch,
    const FailureRecord& record) {
  const auto count = store_->add(records_key(epoch.number), 1);
  const auto index = static_cast<uint64_t>(count - 1);
  store_->set(record_key(epoch.number, index), encode(record));
}

void C10dChannel::read_records(Epoch& epoch) {
  while (store_->check({record_key(epoch.number, epoch.records)})) {
    const auto record = decode_failure(
        store_->get_to_str(record_key(epoch.number, epoch.records)));
    epoch.failure = epoch.records == 0 ? record.text : epoch.failure;
    epoch.limit = std::min(epoch.limit, record.limit);
    ++epoch.records;
  }
}

void C10dChannel::leave_locked(Epoch& epoch) {
  if (epoch.has_left) {
    return;
  }
  epoch.has_left = true;
  auto next = std::make_shared<Epoch>();
  next->number = epoch.number + 1;
  if (owns_group_) {
    make_group(*next, epoch.group);
  } else {
    next->group = epoch.group;
  }
  epoch_ = std::move(next);
  calls_ = 0;
}

void C10dChannel::look(Epoch& epoch, const std::string& who) {
  if (members_.size() == 1) {
    return;
  }
  std::vector<int> waiting_for;
  for (const int rank : epoch.group->not_arrived()) {
    waiting_for.push_back(members_.world_ranks[static_cast<size_t>(rank)]);
  }
  look_for(waiting_for, epoch, who);
}

void C10dChannel::look_for(
    const std::vector<int>& waiting_for,
    Epoch& epoch,
    const std::string& who) {
  world_->look(waiting_for, who);
  try {
    const std::lock_guard lock(mutex_);
    if (!epoch.has_left && world_->aborted().empty()) {
      read_records(epoch);
    }
  } catch (...) {
    world_->abort(
        "the store does not answer " + who + ": " +
        c10d_text_of(std::current_exception()));
  }
}

// For what is called often and does not wait.
void C10dChannel::look_sometimes(Epoch& epoch, const std::string& who) {
  constexpr std::chrono::milliseconds kInterval(50);
  const auto now = std::chrono::steady_clock::now();
  if (now - last_look_ >= kInterval) {
    look(epoch, who);
    last_look_ = now;
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
    world_->abort(
        "the store does not answer " + who_calls(ticket.operation->call()) +
        ": " + c10d_text_of(std::current_exception()));
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

std::shared_ptr<C10dChannel> C10dChannel::make_child(
    const Ticket& ticket,
    int color,
    const std::vector<int>& ranks,
    int rank) {
  Members members{.rank = rank};
  for (const int each : ranks) {
    members.world_ranks.push_back(
        members_.world_ranks[static_cast<size_t>(each)]);
  }
  std::shared_ptr<C10dGroup> shared;
  if (!world_->has_factory() && members.size() > 1) {
    if (members.world_ranks != members_.world_ranks) {
      throw CommunicationError(
          "split: a world over a single back end can only be split into all of "
          "its ranks in their order, but got " +
          std::to_string(members.size()) + " of " +
          std::to_string(members_.size()) +
          " ranks, or another order. Give world_over a factory of back ends.");
    }
    shared = ticket.epoch->group;
  }
  std::string name = name_ + ".epoch" + std::to_string(ticket.epoch->number) +
      "call" + std::to_string(ticket.operation->number()) + "color" +
      std::to_string(color);
  return std::make_shared<C10dChannel>(
      world_, std::move(name), std::move(members), std::move(shared));
}

} // namespace fsdp::detail
