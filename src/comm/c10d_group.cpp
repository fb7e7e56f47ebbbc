#include "comm/c10d_group.h"

#include "comm/c10d_wait.h"
#include "comm/deadline.h"
#include "comm/fork_hold.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <thread>

namespace fsdp::detail {
namespace {

// How long a group without a successor is kept for calls that are not complete.
constexpr std::chrono::milliseconds kLastCalls(2000);

std::string here_key(int rank) {
  return "here/" + std::to_string(rank);
}

bool is_here(c10d::Store& store, int rank) {
  return store.check({here_key(rank)});
}

bool is_over(const C10dOperation& operation) {
  return operation.state() != C10dOperation::State::kUnfinished &&
      !operation.is_running();
}

} // namespace

C10dGroup::C10dGroup(int rank, int size, std::chrono::milliseconds timeout)
    : rank_(rank),
      size_(size),
      timeout_(timeout),
      generation_(fork_generation()),
      is_made_(size == 1),
      arrived_(static_cast<size_t>(size), size == 1) {
}

C10dGroup::~C10dGroup() {
  if (generation_ != fork_generation()) {
    static_cast<void>(transport_.release());
  }
}

void C10dGroup::make(const Making& making) {
  bool all_are_here = false;
  try {
    all_are_here = await_arrivals(making);
    if (all_are_here) {
      attach(making.factory(
          c10::make_intrusive<c10d::PrefixStore>("connect", making.store),
          rank_,
          size_));
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    fail_all(c10d_text_of(std::current_exception()));
  }
  if (making.previous != nullptr) {
    const Deadline deadline(kLastCalls);
    if (!all_are_here) { // peers may still need the calls before
      making.previous->finish(
          [&] { return making.is_over() || deadline.passed(); });
    }
    making.previous->close();
  }
}

// A rank comes when it has connected the group before: a peer may then close
// it. Once it has come it connects whatever happens, as the others wait for it.
// Returns whether all have come.
bool C10dGroup::await_arrivals(const Making& making) {
  constexpr std::chrono::milliseconds kLongestPause(10);
  std::chrono::milliseconds pause(1);
  C10dGroup* const previous = making.previous.get();
  const auto wait_until = [&](const auto& is_done) {
    C10dWait wait(kNoLimit);
    while (!making.is_over() && !is_done()) {
      if (previous != nullptr) {
        previous->pump(); // peers may still need its calls
      }
      if (wait.look_is_due()) {
        throw_if_one_has_left(making);
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
  };
  wait_until([&] {
    return is_broken() || previous == nullptr || previous->is_settled();
  });
  if (making.is_over() || is_broken()) {
    return false;
  }
  making.store->set(here_key(rank_), std::vector<uint8_t>{1});
  wait_until([&] { return all_have_come(*making.store); });
  return !making.is_over();
}

void C10dGroup::throw_if_one_has_left(const Making& making) const {
  if (making.has_left == nullptr) {
    return;
  }
  for (const int rank : not_arrived()) {
    // It may have come just before it left.
    if (rank != rank_ && making.has_left(rank) &&
        !is_here(*making.store, rank)) {
      throw CommunicationError(rank_text(rank, size_) + " has left");
    }
  }
}

bool C10dGroup::all_have_come(c10d::Store& store) {
  for (size_t r = 0; r < arrived_.size(); ++r) {
    // Only this thread writes arrived_.
    if (!arrived_[r] && is_here(store, static_cast<int>(r))) {
      const std::lock_guard lock(mutex_);
      arrived_[r] = true;
    }
  }
  return std::find(arrived_.begin(), arrived_.end(), false) == arrived_.end();
}

void C10dGroup::adopt(C10dBackendPtr backend) {
  arrived_.assign(arrived_.size(), true);
  attach(std::move(backend));
}

void C10dGroup::attach(C10dBackendPtr backend) {
  const std::lock_guard lock(mutex_);
  if (broken_.empty()) {
    transport_ = std::make_unique<C10dTransport>(
        std::move(backend), rank_, size_, timeout_);
    is_made_ = true;
    pump_locked();
  }
}

void C10dGroup::add(const std::shared_ptr<C10dOperation>& operation) {
  const std::lock_guard lock(mutex_);
  if (operation->state() != C10dOperation::State::kUnfinished) {
    return; // of one rank alone
  }
  if (!broken_.empty()) {
    operation->cancel(broken_);
    return;
  }
  waiting_.push_back(operation);
  pump_locked();
}

C10dOperation::State C10dGroup::poll(C10dOperation& operation) {
  const std::lock_guard lock(mutex_);
  pump_locked();
  operation.update();
  return operation.is_running() ? C10dOperation::State::kUnfinished
                                : operation.state();
}

void C10dGroup::pump() {
  const std::lock_guard lock(mutex_);
  pump_locked();
}

void C10dGroup::pump_locked() {
  while (transport_ != nullptr && !waiting_.empty() &&
         waiting_.front()->advance(*transport_)) {
    started_.splice(started_.end(), waiting_, waiting_.begin());
  }
  std::erase_if(started_, [](const auto& operation) {
    operation->update();
    return is_over(*operation);
  });
}

bool C10dGroup::is_broken() const {
  const std::lock_guard lock(mutex_);
  return !broken_.empty();
}

bool C10dGroup::is_settled() const {
  const std::lock_guard lock(mutex_);
  return is_made_ || !broken_.empty();
}

std::vector<int> C10dGroup::not_arrived() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (size_t r = 0; r < arrived_.size(); ++r) {
    if (!arrived_[r]) {
      ranks.push_back(static_cast<int>(r));
    }
  }
  return ranks;
}

std::vector<std::pair<uint64_t, Call>> C10dGroup::open_calls(
    size_t limit) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<uint64_t, Call>> calls;
  for (const auto* list : {&started_, &waiting_}) {
    for (const auto& operation : *list) {
      if (calls.size() < limit) {
        calls.emplace_back(operation->number(), operation->call());
      }
    }
  }
  return calls;
}

bool C10dGroup::has_open_call_below(uint64_t limit) const {
  const auto first = open_calls(1);
  return !first.empty() && first[0].first < limit;
}

std::vector<int> C10dGroup::lost_ranks() {
  const std::lock_guard lock(mutex_);
  return transport_ != nullptr && transport_->tagged() != nullptr
      ? transport_->tagged()->lost_ranks()
      : std::vector<int>();
}

void C10dGroup::break_off(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  fail_all(reason);
}

void C10dGroup::fail_all(const std::string& reason) {
  if (!broken_.empty()) {
    return;
  }
  broken_ = reason;
  if (transport_ != nullptr) {
    break_backend(transport_->backend());
  }
  for (const auto& operation : waiting_) {
    operation->cancel(reason);
  }
  started_.splice(started_.end(), waiting_);
}

void C10dGroup::finish(const std::function<bool()>& is_over) {
  constexpr std::chrono::milliseconds kPause(5);
  constexpr uint64_t kAny = UINT64_MAX;
  while (has_open_call_below(kAny) && !is_over()) {
    std::this_thread::sleep_for(kPause);
    pump();
  }
}

void C10dGroup::close() {
  std::unique_ptr<C10dTransport> transport;
  {
    const std::lock_guard lock(mutex_);
    pump_locked();
    if (!started_.empty() || !waiting_.empty()) {
      fail_all("the group was given up, as all ranks have left it");
    }
    broken_ = broken_.empty() ? "the group is closed" : broken_;
    transport = std::move(transport_);
  }
  // Without the lock: its destructor waits for its threads.
}

} // namespace fsdp::detail
