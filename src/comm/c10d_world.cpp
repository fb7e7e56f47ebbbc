#include "comm/c10d_world.h"

#include "comm/c10d_polling_store.h"
#include "comm/deadline.h"
#include "comm/fork_hold.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <utility>

namespace fsdp::detail {
namespace {

const char* const kWhoServes =
    "The process that serves the store (rank 0, unless the program says"
    " otherwise) is stopped, or has ended or died: look at its output.";

std::string store_text(const std::exception_ptr& error) {
  return "the store does not answer: " + c10d_text_of(error);
}

/// A program may make several worlds over one store, on all ranks in the same
/// order.
C10dStorePtr store_of_world(const C10dWorldOptions& options) {
  if (options.store == nullptr) { // nobody reads it
    return c10::make_intrusive<c10d::HashStore>();
  }
  const auto counter = "libfsdp/worlds_of_rank_" + std::to_string(options.rank);
  try {
    const auto count = options.store->add(counter, 1);
    return c10::make_intrusive<c10d::PrefixStore>(
        "libfsdp/world" + std::to_string(count), options.store);
  } catch (...) {
    throw CommunicationError(
        "start of the world: " + rank_text(options.rank, options.size) + ": " +
        store_text(std::current_exception()) + ". " + kWhoServes);
  }
}

/// The generation of this process, with forks counted from now on.
uint64_t watch_generation() {
  const ForkHold hold;
  return fork_generation();
}

/// A call that meets no other, as its tag is this rank's own.
std::shared_ptr<C10dOperation> make_watch_call(int rank, int size) {
  const auto bytes = static_cast<size_t>(size);
  const auto input = c10d_new_bytes(bytes);
  const auto output = c10d_new_bytes(bytes);
  std::vector<int64_t> cuts;
  for (int64_t r = 0; r <= size; ++r) {
    cuts.push_back(r);
  }
  const auto step = [=](C10dTransport& transport, C10dWorks& works) {
    transport.scatter_parts(input, cuts, output, works);
  };
  C10dPlan plan{.call = {.what = "watch"}, .steps = {step}};
  const auto own_tag = static_cast<uint64_t>(rank);
  return std::make_shared<C10dOperation>(std::move(plan), 0, own_tag);
}

bool is_among(int rank, const std::vector<int>& ranks) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

} // namespace

std::shared_ptr<C10dWorld> C10dWorld::make(C10dWorldOptions options) {
  return {new C10dWorld(std::move(options)), [](C10dWorld* world) {
            if (!world->forked()) {
              delete world;
            }
          }};
}

C10dWorld::C10dWorld(C10dWorldOptions options)
    : generation_(watch_generation()),
      options_(std::move(options)),
      store_(store_of_world(options_)),
      watch_(
          std::make_shared<C10dGroup>(options_.rank, options_.size, kNoLimit)) {
  if (options_.is_tagged && options_.size > 1) {
    start_watch();
  }
}

C10dWorld::~C10dWorld() {
  constexpr std::chrono::milliseconds kLongestEnd(1000);
  write("goodbye/" + std::to_string(options_.rank), "1");
  *is_over_ = true;
  const Deadline deadline(kLongestEnd);
  for (Task& task : tasks_) {
    while (!*task.is_done && !deadline.passed()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (*task.is_done) {
      task.thread.join();
    } else { // it waits for the store
      task.thread.detach();
      for (const auto& group : task.groups) {
        group->close();
      }
    }
  }
  watch_->close();
}

C10dStorePtr C10dWorld::store_at(const std::string& prefix) const {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store_);
}

void C10dWorld::start_watch() {
  watch_call_ = make_watch_call(options_.rank, options_.size);
  watch_->add(watch_call_);
  make_group(watch_, "watch", {});
}

void C10dWorld::await_watch() {
  const Deadline deadline(options_.timeout);
  while (watch_call_ != nullptr && !watch_->is_settled() &&
         !deadline.passed()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool C10dWorld::forked() const {
  return generation_ != fork_generation();
}

std::string C10dWorld::aborted() const {
  if (forked()) { // the lock may be held by a thread that is not here
    return "this process is a fork of a rank; only the rank itself can "
           "communicate";
  }
  const std::lock_guard lock(mutex_);
  return aborted_;
}

void C10dWorld::abort(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (!aborted_.empty()) {
      return;
    }
    aborted_ = reason;
    *is_over_ = true;
  }
  write("aborted", reason);
}

void C10dWorld::tell(const std::string& key, const std::string& text) {
  if (aborted().empty()) {
    write(key, text);
  }
}

// A store that has failed is left alone: the peers notice by themselves, and it
// is not made to complain again.
void C10dWorld::write(const std::string& key, const std::string& text) {
  if (store_is_lost_) {
    return;
  }
  try {
    if (!store_->check({key})) {
      store_->set(key, text);
    }
  } catch (const std::exception&) {
    store_is_lost_ = true;
  }
}

void C10dWorld::look(
    const std::vector<int>& waiting_for,
    const std::string& what) {
  if (!aborted().empty()) {
    return;
  }
  try {
    if (store_->check({"aborted"})) {
      const auto reason = store_->get_to_str("aborted");
      const std::lock_guard lock(mutex_);
      aborted_ = aborted_.empty() ? reason : aborted_;
      *is_over_ = true;
    } else {
      look_at_watch(waiting_for, what);
    }
  } catch (...) {
    lose_store(what, std::current_exception());
  }
}

// The store ends with the rank that serves it, which the watch knows.
void C10dWorld::lose_store(
    const std::string& what,
    const std::exception_ptr& error) {
  store_is_lost_ = true;
  std::string text = store_text(error);
  constexpr int kTries = 20;
  for (int i = 0; i < kTries && !watch_is_broken(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (watch_is_broken()) {
    for (const int rank : watch_->lost_ranks()) {
      text += "; the connection to " + rank_text(rank, options_.size) +
          " was closed";
    }
  }
  abort(text + " (seen " + what + "). " + kWhoServes);
}

bool C10dWorld::watch_is_broken() {
  return watch_call_ != nullptr &&
      watch_->poll(*watch_call_) == C10dOperation::State::kFailed;
}

void C10dWorld::look_at_watch(
    const std::vector<int>& waiting_for,
    const std::string& what) {
  if (!watch_is_broken()) {
    return;
  }
  for (const int rank : watch_->lost_ranks()) {
    const std::string text = rank_text(rank, options_.size);
    if (!has_said_goodbye(rank)) {
      abort(
          text + " has died: its connection was closed (seen " + what +
          "). Look for the reason in its output.");
    } else if (is_among(rank, waiting_for)) {
      abort(
          text + " has ended without this call (seen " + what +
          "). Look for the first error there.");
    }
  }
}

bool C10dWorld::has_said_goodbye(int rank) {
  return store_->check({"goodbye/" + std::to_string(rank)});
}

void C10dWorld::make_group(
    const std::shared_ptr<C10dGroup>& group,
    const std::string& prefix,
    C10dGroup::Making making) {
  making.is_over = [flag = is_over_] { return flag->load(); };
  making.store =
      c10::make_intrusive<C10dPollingStore>(store_at(prefix), making.is_over);
  making.factory = options_.factory;
  std::vector<std::shared_ptr<C10dGroup>> groups = {group};
  if (making.previous != nullptr) {
    groups.push_back(making.previous);
  }
  in_background(std::move(groups), [group, making = std::move(making)] {
    group->make(making);
  });
}

void C10dWorld::retire(const std::shared_ptr<C10dGroup>& group) {
  constexpr uint64_t kAny = UINT64_MAX;
  if (!group->has_open_call_below(kAny)) {
    group->close();
    return;
  }
  in_background({group}, [flag = is_over_, group] {
    group->finish([flag] { return flag->load(); });
    group->close();
  });
}

void C10dWorld::in_background(
    std::vector<std::shared_ptr<C10dGroup>> groups,
    std::function<void()> run) {
  const std::lock_guard lock(mutex_);
  for (auto each = tasks_.begin(); each != tasks_.end();) {
    if (*each->is_done) {
      each->thread.join();
      each = tasks_.erase(each);
    } else {
      ++each;
    }
  }
  const auto is_done = std::make_shared<std::atomic<bool>>(false);
  std::thread thread([run = std::move(run), is_done] {
    run();
    *is_done = true;
  });
  tasks_.push_back({std::move(thread), is_done, std::move(groups)});
}

} // namespace fsdp::detail
