#include "comm/c10d_world.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <utility>

namespace fsdp::detail {
namespace {

/// A program may make several worlds over one store, on all ranks in the same
/// order.
C10dStorePtr store_of_world(const C10dWorldOptions& options) {
  if (options.store == nullptr) { // nobody reads it
    return c10::make_intrusive<c10d::HashStore>();
  }
  const auto counter = "libfsdp/worlds_of_rank_" + std::to_string(options.rank);
  const auto count = options.store->add(counter, 1);
  return c10::make_intrusive<c10d::PrefixStore>(
      "libfsdp/world" + std::to_string(count), options.store);
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
    if (transport.tagged() != nullptr) {
      transport.scatter_parts(input, cuts, output, works);
    }
  };
  C10dPlan plan{.call = {.what = "watch"}, .steps = {step}};
  const auto own_tag = static_cast<uint64_t>(rank);
  return std::make_shared<C10dOperation>(std::move(plan), 0, own_tag);
}

bool is_among(int rank, const std::vector<int>& ranks) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

} // namespace

C10dWorld::C10dWorld(C10dWorldOptions options)
    : options_(std::move(options)),
      store_(store_of_world(options_)),
      watch_(std::make_shared<C10dGroup>(
          options_.rank,
          options_.size,
          options_.timeout)) {
}

C10dWorld::~C10dWorld() {
  try {
    store_->set("goodbye/" + std::to_string(options_.rank), "1");
  } catch (const std::exception&) {
    // Its server may have ended before.
  }
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  for (Task& task : tasks_) {
    task.thread.join();
  }
  watch_->close();
}

bool C10dWorld::can_borrow() const {
  const std::lock_guard lock(mutex_);
  return can_borrow_;
}

void C10dWorld::set_can_borrow(bool can_borrow) {
  const std::lock_guard lock(mutex_);
  can_borrow_ = can_borrow;
}

C10dStorePtr C10dWorld::store_at(const std::string& prefix) const {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store_);
}

C10dStorePtr C10dWorld::own_store_at(const std::string& prefix) const {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store_->clone());
}

void C10dWorld::start_watch() {
  if (!has_factory() || options_.size == 1) {
    return;
  }
  watch_call_ = make_watch_call(options_.rank, options_.size);
  watch_->add(watch_call_);
  make(watch_, "watch", nullptr);
}

std::string C10dWorld::aborted() const {
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
  }
  try {
    if (!store_->check({"aborted"})) {
      store_->set("aborted", reason);
    }
  } catch (const std::exception&) {
    // The peers notice by themselves.
  }
}

bool C10dWorld::is_over() const {
  const std::lock_guard lock(mutex_);
  return is_ending_ || !aborted_.empty();
}

void C10dWorld::look(
    const std::vector<int>& waiting_for,
    const std::string& what) {
  try {
    if (store_->check({"aborted"})) {
      const auto reason = store_->get_to_str("aborted");
      const std::lock_guard lock(mutex_);
      aborted_ = aborted_.empty() ? reason : aborted_;
    } else {
      look_at_watch(waiting_for, what);
    }
  } catch (const std::exception&) {
    const auto error = std::current_exception();
    abort(
        "the store does not answer " + what + ": " + c10d_text_of(error) +
        ". The rank that serves it may have ended.");
  }
}

void C10dWorld::look_at_watch(
    const std::vector<int>& waiting_for,
    const std::string& what) {
  if (watch_call_ == nullptr ||
      watch_->poll(*watch_call_) != C10dOperation::State::kFailed) {
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

void C10dWorld::make(
    const std::shared_ptr<C10dGroup>& group,
    const std::string& prefix,
    std::shared_ptr<C10dGroup> previous) {
  C10dGroup::Making making{
      .store = own_store_at(prefix),
      .factory = options_.factory,
      .is_over = [this] { return is_over(); },
      .previous = std::move(previous)};
  in_background([group, making] { group->make(making); });
}

void C10dWorld::retire(std::shared_ptr<C10dGroup> group) {
  constexpr uint64_t kAny = UINT64_MAX;
  if (!group->has_open_call_below(kAny)) {
    group->close();
    return;
  }
  in_background([this, group = std::move(group)] {
    while (group->has_open_call_below(kAny) && !is_over()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      group->pump();
    }
    group->close();
  });
}

void C10dWorld::in_background(std::function<void()> task) {
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
  std::thread thread([run = std::move(task), is_done] {
    run();
    *is_done = true;
  });
  tasks_.push_back({std::move(thread), is_done});
}

} // namespace fsdp::detail
