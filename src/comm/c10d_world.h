#pragma once

#include "comm/c10d_group.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace fsdp::detail {

struct C10dWorldOptions {
  C10dBackendFactory factory;  // empty: `backend` is all there is
  C10dBackendPtr backend = {}; // of the program
  C10dStorePtr store = {};     // of all ranks; null only without a factory
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  bool compare_calls = false; // each call by a small gather before it runs
  bool is_tagged = false;     // the factory makes TaggedBackends
};

/// What the communicators of one rank that come from one another by split()
/// share. [Note: What ends a c10d world]
///
/// A failure of a step is told through the store, and survived, and so is a
/// rank that has given up a communicator (see C10dChannel). Everything else
/// ends the world, in all communicators and on all ranks: a wait that is too
/// long, an error of the back end or of the store, a rank that has died.
/// Whoever notices first writes the reason into the store.
///
/// Death is noticed by a group of its own, the watch, in which every rank has a
/// call that no other rank ever answers: it ends when a connection closes,
/// which the operating system does for a process that is no more. A rank that
/// ends in good order says so in the store before it closes. Only back ends of
/// our own can have a call without an answer; with others death shows as an
/// error of the call that needs the dead rank.
///
/// A forked child of the rank is no rank. What it has inherited of the world
/// is never destroyed there, since sockets, threads and what is said in the
/// store are the parent's.
class C10dWorld {
 public:
  static std::shared_ptr<C10dWorld> make(C10dWorldOptions options);

  explicit C10dWorld(C10dWorldOptions options);

  /// Says goodbye, and ends what runs in the background. Never waits for a
  /// peer.
  ~C10dWorld();

  C10dWorld(const C10dWorld&) = delete;
  C10dWorld& operator=(const C10dWorld&) = delete;

  const C10dWorldOptions& options() const { return options_; }

  /// Whether groups can be made: for a split, and for the step after a failure.
  bool has_factory() const { return static_cast<bool>(options_.factory); }

  /// A part of the store, for what never waits.
  C10dStorePtr store_at(const std::string& prefix) const;

  /// Waits until the watch is connected, if there is one: a world that ends
  /// sooner would look like an error to those that still connect to it.
  void await_watch();

  /// Whether this process is a child of the one that made the world.
  bool forked() const;

  std::string aborted() const;

  /// Ends the world with this reason, unless it has ended.
  void abort(const std::string& reason);

  /// Ends the world because the store has failed with `error`, as seen `what`.
  void lose_store(const std::string& what, const std::exception_ptr& error);

  /// Ends the world if another rank says so, or has died; `waiting_for` are
  /// ranks that are still to come, and `what` says who looks. Never waits.
  void look(const std::vector<int>& waiting_for, const std::string& what);

  /// Tells all ranks, for good; what was told before stays. Nothing that is
  /// told is needed by a world that has been aborted. Throws nothing.
  void tell(const std::string& key, const std::string& text);

  /// Makes `group` in the background, with what is left open in `making`.
  void make_group(
      const std::shared_ptr<C10dGroup>& group,
      const std::string& prefix,
      C10dGroup::Making making);

  /// Closes `group` when its calls are complete, or the world ends.
  void retire(const std::shared_ptr<C10dGroup>& group);

 private:
  struct Task {
    std::thread thread;
    std::shared_ptr<std::atomic<bool>> is_done;
    std::vector<std::shared_ptr<C10dGroup>> groups;
  };

  /// `run` must not use the world, which may end before it. The `groups` that
  /// it works on are closed then.
  void in_background(
      std::vector<std::shared_ptr<C10dGroup>> groups,
      std::function<void()> run);
  void start_watch();
  void look_at_watch(
      const std::vector<int>& waiting_for,
      const std::string& what);
  bool watch_is_broken();
  bool has_said_goodbye(int rank);
  void write(const std::string& key, const std::string& text);

  const uint64_t generation_; // of forks
  const C10dWorldOptions options_;
  const C10dStorePtr store_;
  const std::shared_ptr<C10dGroup> watch_;
  std::shared_ptr<C10dOperation> watch_call_; // null: there is no watch
  /// Set when the world has ended, or been aborted.
  const std::shared_ptr<std::atomic<bool>> is_over_ =
      std::make_shared<std::atomic<bool>>(false);
  std::atomic<bool> store_is_lost_ = false;
  mutable std::mutex mutex_; // guards what follows
  std::string aborted_;
  std::list<Task> tasks_;
};

} // namespace fsdp::detail
