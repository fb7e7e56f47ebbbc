#include "comm/c10d_channel.h"

#include <algorithm>
#include <utility>

namespace fsdp::detail {
namespace {

std::string records_key(uint64_t epoch) {
  return "epoch" + std::to_string(epoch) + "/failures";
}

std::string record_key(uint64_t epoch, uint64_t index) {
  return records_key(epoch) + "/" + std::to_string(index);
}

std::string left_key(int rank) {
  return "left/" + std::to_string(rank);
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

void C10dChannel::make_group(
    Epoch& epoch,
    std::shared_ptr<C10dGroup> previous) {
  epoch.group = std::make_shared<C10dGroup>(
      members_.rank, members_.size(), world_->options().timeout);
  if (members_.size() == 1) {
    return;
  }
  try {
    world_->make_group(
        epoch.group,
        name_ + "/group" + std::to_string(epoch.number),
        {.previous = std::move(previous), .has_left = [store = store_](int r) {
           return store->check({left_key(r)});
         }});
  } catch (...) {
    epoch.group->break_off(c10d_text_of(std::current_exception()));
  }
}

void C10dChannel::throw_if_forked() const {
  if (world_->forked()) {
    throw CommunicationError(world_->aborted());
  }
}

C10dChannel::Ticket C10dChannel::issue(C10dPlan plan) {
  throw_if_forked();
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
  if (world_->forked() ||
      ticket.epoch->group->poll(*ticket.operation) !=
          C10dOperation::State::kUnfinished) {
    return true;
  }
  look_sometimes(*ticket.epoch, who_calls(ticket.operation->call()));
  const std::lock_guard lock(mutex_);
  return ticket.epoch->has_left || !world_->aborted().empty() ||
      ticket.operation->number() >= ticket.epoch->limit;
}

uint64_t C10dChannel::epoch() {
  return current_epoch()->number;
}

std::shared_ptr<C10dChannel::Epoch> C10dChannel::current_epoch() {
  const std::lock_guard lock(mutex_);
  return epoch_;
}

void C10dChannel::end_epoch(const std::string& failure) {
  if (world_->forked()) {
    return;
  }
  const std::lock_guard lock(mutex_);
  Epoch& epoch = *epoch_;
  if (epoch.has_left) {
    return; // the last one, and it has ended already
  }
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
      world_->lose_store(
          "in telling: " + record.text, std::current_exception());
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
  if (has_left_) {
    return; // there is no next epoch
  }
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

void C10dChannel::leave() {
  if (world_->forked()) {
    return;
  }
  std::shared_ptr<C10dGroup> group;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(has_left_, true)) {
      return;
    }
    group = epoch_->group;
  }
  if (members_.size() > 1) {
    world_->tell(name_ + "/" + left_key(members_.rank), "1");
  }
  if (owns_group_) {
    world_->retire(group);
  }
}

bool C10dChannel::has_left() {
  const std::lock_guard lock(mutex_);
  return has_left_;
}

// Of a peer; its failures are told before.
void C10dChannel::throw_if_peer_has_left(const Ticket& ticket) {
  const C10dOperation& operation = *ticket.operation;
  const Call& call = operation.call();
  try {
    for (int r = 0; r < members_.size(); ++r) {
      if (r != members_.rank && store_->check({left_key(r)})) {
        const std::lock_guard lock(mutex_);
        fail_epoch(
            *ticket.epoch,
            {operation.number(),
             title_of(call.kind, call.what) + ": " +
                 rank_text(members_.rank, members_.size()) +
                 " waits for rank " + std::to_string(r) +
                 ", gone without this call. Look for the first error there."});
        break;
      }
    }
  } catch (...) {
    world_->lose_store(who_calls(call), std::current_exception());
  }
  throw_if_ended(ticket);
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
    if (world_->aborted().empty()) {
      read_records(epoch);
    }
  } catch (...) {
    world_->lose_store(who, std::current_exception());
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
