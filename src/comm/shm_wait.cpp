// How a rank of a ShmGroup waits, and what it does when nobody comes.

#include "comm/futex.h"
#include "comm/shm_group.h"

#include <fsdp/communicator.h>

#include <sched.h>

#include <thread>

namespace fsdp::detail {
namespace {

using std::chrono::milliseconds;

// Long enough for what is just about to happen (2 microseconds), then for ranks
// that share a core (waking a sleeper takes 20), then sleep.
constexpr int kSpins = 50;
constexpr std::chrono::microseconds kYieldTime(50);
constexpr milliseconds kLookAroundEvery(100);
// Peers do not ring for what they do in other groups.
constexpr milliseconds kLookAtOthersEvery(1);
// Who left because of an exception may still say which.
constexpr milliseconds kGraceForReason(1000);
// Of missing ranks: a text has no room for hundreds.
constexpr int kMostDescribed = 6;

// Any limit can be compared with it: in nanoseconds the longest would overflow.
milliseconds milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration_cast<milliseconds>(
      std::chrono::steady_clock::now() - start);
}

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

} // namespace

std::optional<int> ShmGroup::first_missing(const HasCome& has_come) const {
  for (int distance = 1; distance < size(); ++distance) {
    const int peer = (rank_ + distance) % size();
    if (!has_come(peer)) {
      return peer;
    }
  }
  return std::nullopt;
}

void ShmGroup::await(const std::string& title, const HasCome& has_come) {
  Lock lock(mutex_);
  Waiting waiting{.title = title, .has_come = has_come, .start = Clock::now()};
  while (true) {
    // Before the look at who is missing, since a peer may fail later on, when
    // all have come.
    const std::string failure = failure_of(made_);
    const auto missing = first_missing(has_come);
    if (!missing) {
      return;
    }
    check_aborted(title);
    if (!failure.empty()) {
      fail(failure);
    }
    waiting.peer = *missing;
    waiting.calls = contributed_;
    wait_for(lock, waiting, [&] {
      return has_come(waiting.peer) || !failure_of(made_).empty();
    });
  }
}

void ShmGroup::wait_for(
    Lock& lock,
    const Waiting& waiting,
    const std::function<bool()>& may_go_on) {
  const auto is_over = [&] {
    return may_go_on() || line(waiting.peer).gone != ShmGone::kNo;
  };
  for (int i = 0; i < kSpins; ++i) {
    if (may_go_on()) {
      return;
    }
    pause_briefly();
  }
  const auto start = Clock::now();
  while (Clock::now() - start < kYieldTime) {
    sched_yield();
    if (may_go_on()) {
      return;
    }
  }
  sleep(lock, waiting, is_over);
  if (!may_go_on() && line(waiting.peer).gone != ShmGone::kNo) {
    check_gone(lock, waiting);
  }
}

void ShmGroup::sleep(
    Lock& lock,
    const Waiting& waiting,
    const std::function<bool()>& may_go_on) {
  mine().waits_for = static_cast<uint32_t>(waiting.peer) + 1;
  auto next_look = Clock::now() + kLookAroundEvery;
  while (true) {
    const uint32_t bell = mine().bell; // before the look at what it announces
    if (may_go_on() || !host_->aborted().empty()) {
      break;
    }
    lock.unlock();
    const bool others_wait = host_->let_others_go_on(this);
    futex_wait(
        mine().bell, bell, others_wait ? kLookAtOthersEvery : kLookAroundEvery);
    lock.lock();
    if (Clock::now() >= next_look && !may_go_on()) {
      look_around(waiting);
      next_look = Clock::now() + kLookAroundEvery;
    }
  }
  mine().waits_for = 0;
}

void ShmGroup::wake(bool all) {
  const auto me = static_cast<uint32_t>(rank_) + 1;
  for (int r = 0; r < size(); ++r) {
    const uint32_t waits_for = line(r).waits_for;
    if (r != rank_ && waits_for != 0 && (all || waits_for == me)) {
      ++line(r).bell;
      futex_wake(line(r).bell);
    }
  }
}

void ShmGroup::ring() {
  const std::lock_guard lock(mutex_);
  wake(/*all=*/false);
}

void ShmGroup::look_around(const Waiting& waiting) {
  const int world = host_->segment().size();
  if (const auto dead = host_->dead_rank()) {
    host_->abort(
        rank_text(*dead, world) + " (" + host_->segment().describe(*dead) +
        ") died; " + rank_text(members_[static_cast<size_t>(rank_)], world) +
        " noticed it in " + waiting.title + ". Look for its last lines.");
  } else if (milliseconds_since(waiting.start) > host_->timeout()) {
    host_->abort(missing_text(waiting));
  }
}

std::string ShmGroup::describe(int peer) const {
  return std::to_string(peer) + " (" +
      host_->segment().describe(members_[static_cast<size_t>(peer)]) +
      ", last call here: " + line(peer).last_call.load() + ")";
}

std::string ShmGroup::missing_text(const Waiting& waiting) const {
  std::string ranks;
  int count = 0;
  for (int r = 0; r < size(); ++r) {
    if (r != rank_ && !waiting.has_come(r) && ++count <= kMostDescribed) {
      ranks += (count == 1 ? "" : ", ") + describe(r);
    }
  }
  if (count > kMostDescribed) {
    ranks += " and " + std::to_string(count - kMostDescribed) + " more";
  }
  return waiting.title + ": " + rank_text(rank_, size()) + " timed out after " +
      std::to_string(host_->timeout().count()) +
      " ms; not arrived: " + (count == 1 ? "rank " : "ranks ") + ranks +
      ". Look for an error or a different path there, or raise the time limit "
      "if it is only slow.";
}

bool ShmGroup::is_gone_for_good(const Waiting& waiting) {
  const ShmGone gone = line(waiting.peer).gone; // before the look at its calls
  if (gone == ShmGone::kNo || waiting.has_come(waiting.peer)) {
    return false;
  }
  const auto noticed = noticed_gone_.try_emplace(waiting.peer, Clock::now());
  return gone == ShmGone::kGone ||
      milliseconds_since(noticed.first->second) > kGraceForReason;
}

void ShmGroup::check_gone(Lock& lock, const Waiting& waiting) {
  if (!is_gone_for_good(waiting)) {
    lock.unlock();
    std::this_thread::sleep_for(milliseconds(1));
    lock.lock();
    return;
  }
  const std::string text = waiting.title + ": " + rank_text(rank_, size()) +
      " waits for rank " + std::to_string(waiting.peer) +
      ", gone without this call. Look for the first error there.";
  go_on(rank_text(rank_, size()) + " failed: " + text, waiting.calls);
  throw CommunicationError(text);
}

void ShmGroup::await_slowest() {
  const auto start = Clock::now();
  const auto is_near = [this](int peer) {
    return line(peer).epoch + ShmRankLine::kEpochs > epoch_ + 1 ||
        line(peer).reads_no_more != 0;
  };
  while (first_missing(is_near) && host_->aborted().empty()) {
    std::this_thread::sleep_for(milliseconds(1));
    look_around(
        {.title = "more failed steps than others have seen",
         .has_come = is_near,
         .start = start});
  }
}

} // namespace fsdp::detail
