#include "comm/thread_group.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace fsdp::detail {
namespace {

// Far enough for any limit, near enough that the clock does not overflow.
constexpr std::chrono::hours kLongestWait(24 * 365);

bool is_complete(const Operation& operation) {
  return operation.arrived == std::ssize(operation.contributions);
}

// The same text whichever of the two ranks came first.
std::string
mismatch_text(const Operation& operation, const Call& call, int rank) {
  const int size = static_cast<int>(operation.contributions.size());
  const bool is_higher = rank > operation.first_rank;
  const std::string difference = is_higher
      ? difference_text(call, rank, operation.call, operation.first_rank, size)
      : difference_text(operation.call, operation.first_rank, call, rank, size);
  return "ranks differ: " + difference +
      ". All ranks must call the same collectives in the same order.";
}

} // namespace

ThreadGroup::ThreadGroup(int size, std::chrono::milliseconds timeout)
    : timeout_(timeout) {
  if (size < 1) {
    throw std::invalid_argument(
        "thread communicators: expected at least 1 rank, but got " +
        std::to_string(size));
  }
  members_.resize(static_cast<size_t>(size));
}

ThreadGroup::Ticket ThreadGroup::issue(
    int rank,
    const Call& call,
    std::vector<std::byte> contribution) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Epoch> epoch = epoch_of(member(rank));
  const uint64_t number = member(rank).sequence;
  if (number >= epoch->limit) {
    go_on(rank);
    throw CommunicationError(epoch->failure);
  }
  std::shared_ptr<Operation>& slot = epoch->operations[number];
  if (slot == nullptr) {
    slot = std::make_shared<Operation>();
    slot->number = number;
    slot->call = call;
    slot->first_rank = rank;
    slot->contributions.resize(members_.size());
  }
  Ticket ticket{rank, epoch, slot};
  if (ticket.operation->call == call) {
    publish(ticket, std::move(contribution));
  } else {
    fail(*epoch, number, mismatch_text(*ticket.operation, call, rank));
  }
  ++member(rank).sequence;
  return ticket;
}

void ThreadGroup::publish(
    const Ticket& ticket,
    std::vector<std::byte> contribution) {
  Operation& operation = *ticket.operation;
  auto& slot = operation.contributions[static_cast<size_t>(ticket.rank)];
  slot.bytes = std::move(contribution);
  slot.present = true;
  ++operation.arrived;
  if (is_complete(operation)) {
    ticket.epoch->operations.erase(operation.number);
    changed_.notify_all();
  }
}

bool ThreadGroup::ready(const Ticket& ticket) const {
  const std::lock_guard lock(mutex_);
  return is_settled(ticket);
}

void ThreadGroup::await(const Ticket& ticket) {
  const auto deadline = Clock::now() +
      std::min<std::chrono::milliseconds>(timeout_, kLongestWait);
  Epoch& epoch = *ticket.epoch;
  const Operation& operation = *ticket.operation;
  std::unique_lock lock(mutex_);
  while (!is_settled(ticket) && Clock::now() < deadline) {
    changed_.wait_until(lock, std::min(deadline, gone_from(operation)));
  }
  if (has_ended(ticket)) {
    throw CommunicationError(epoch.failure);
  }
  if (is_complete(operation)) {
    return;
  }
  std::string failure = epoch.failure;
  if (operation.number < epoch.limit) { // too late, or a rank has left
    const std::string missing = missing_text(ticket);
    failure = epoch.limit == Epoch::kNoLimit ? missing : failure;
    fail(
        epoch,
        operation.number,
        rank_text(ticket.rank, size()) + " failed: " + missing);
  }
  go_on(ticket.rank);
  throw CommunicationError(failure);
}

std::shared_ptr<ThreadGroup>
ThreadGroup::child(const Ticket& ticket, int color, int child_size) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<ThreadGroup>& child = ticket.operation->children[color];
  if (child == nullptr) {
    child = std::make_shared<ThreadGroup>(child_size, timeout_);
  }
  return child;
}

uint64_t ThreadGroup::epoch(int rank) const {
  const std::lock_guard lock(mutex_);
  return members_[static_cast<size_t>(rank)].epoch;
}

void ThreadGroup::end_epoch(int rank, std::string failure) {
  const std::lock_guard lock(mutex_);
  fail(*epoch_of(member(rank)), member(rank).sequence, std::move(failure));
  auto& gone_from = member(rank).gone_from;
  if (gone_from) {
    gone_from = std::min(*gone_from, Clock::now());
  }
  go_on(rank);
}

void ThreadGroup::leave(int rank, std::chrono::milliseconds grace) {
  const std::lock_guard lock(mutex_);
  auto& gone_from = member(rank).gone_from;
  const auto from = Clock::now() + grace;
  gone_from = gone_from ? std::min(*gone_from, from) : from;
  forget_epochs();
  changed_.notify_all();
}

ThreadGroup::Member& ThreadGroup::member(int rank) {
  return members_[static_cast<size_t>(rank)];
}

std::shared_ptr<Epoch> ThreadGroup::epoch_of(const Member& member) {
  std::shared_ptr<Epoch>& epoch = epochs_[member.epoch];
  if (epoch == nullptr) {
    epoch = std::make_shared<Epoch>();
    epoch->number = member.epoch;
  }
  return epoch;
}

void ThreadGroup::fail(Epoch& epoch, uint64_t limit, std::string failure) {
  if (epoch.limit == Epoch::kNoLimit) {
    epoch.failure = std::move(failure);
  }
  epoch.limit = std::min(epoch.limit, limit);
  auto& operations = epoch.operations;
  operations.erase(operations.lower_bound(epoch.limit), operations.end());
  changed_.notify_all();
}

void ThreadGroup::go_on(int rank) {
  ++member(rank).epoch;
  member(rank).sequence = 0;
  forget_epochs();
}

void ThreadGroup::forget_epochs() {
  uint64_t first = UINT64_MAX;
  for (const Member& member : members_) {
    if (!member.gone_from) {
      first = std::min(first, member.epoch);
    }
  }
  epochs_.erase(epochs_.begin(), epochs_.lower_bound(first));
}

bool ThreadGroup::has_ended(const Ticket& ticket) const {
  const Member& member = members_[static_cast<size_t>(ticket.rank)];
  return member.epoch > ticket.epoch->number;
}

bool ThreadGroup::is_settled(const Ticket& ticket) const {
  const Operation& operation = *ticket.operation;
  return has_ended(ticket) || is_complete(operation) ||
      operation.number >= ticket.epoch->limit ||
      gone_from(operation) <= Clock::now();
}

ThreadGroup::Clock::time_point ThreadGroup::gone_from(
    const Operation& operation) const {
  auto first = Clock::time_point::max();
  for (size_t r = 0; r < members_.size(); ++r) {
    if (members_[r].gone_from && !operation.contributions[r].present) {
      first = std::min(first, *members_[r].gone_from);
    }
  }
  return first;
}

std::string ThreadGroup::missing_text(const Ticket& ticket) const {
  const Operation& operation = *ticket.operation;
  const bool has_leaver = gone_from(operation) != Clock::time_point::max();
  std::string ranks;
  int count = 0;
  for (size_t r = 0; r < members_.size(); ++r) {
    if (!operation.contributions[r].present &&
        members_[r].gone_from.has_value() == has_leaver) {
      ranks += (count++ == 0 ? "" : ", ") + std::to_string(r);
    }
  }
  ranks = (count == 1 ? "rank " : "ranks ") + ranks;
  const std::string start = title_of(operation.call.kind, operation.call.what) +
      ": " + rank_text(ticket.rank, size());
  if (has_leaver) {
    return start + " waits for " + ranks +
        ", gone without this call. Look for the first error there.";
  }
  return start + " timed out after " + std::to_string(timeout_.count()) +
      " ms; not arrived: " + ranks +
      ". Look for an error or a different path there, or raise the time limit "
      "if it is only slow.";
}

} // namespace fsdp::detail
