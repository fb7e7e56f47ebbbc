#pragma once

#include <fsdp/world.h>

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace fsdp::testing {

/// What the ranks of tests are. The variable FSDP_TEST_WORLD chooses.
enum class WorldKind : uint8_t {
  kThreads,    // "threads", or not set: run_as_threads()
  kShmThreads, // "shm_threads": threads that share memory as processes do
  kProcesses,  // "processes": see [Note: Tests on processes] in job.h
};
WorldKind world_kind();

/// Skips a test that makes no sense where `condition` holds, which is about
/// world_kind().
#define FSDP_SKIP_IF(condition, reason) \
  if (condition)                        \
  GTEST_SKIP() << #condition << ": " << reason

inline bool are_processes() {
  return world_kind() == WorldKind::kProcesses;
}
/// Whether ranks go on after a time-out, which elsewhere ends a world for good.
inline bool survives_time_outs() {
  return world_kind() == WorldKind::kThreads;
}

/// Whether the weights of nets lie in memory that all ranks read, so that they
/// are not gathered.
bool weights_are_shared();

/// Runs `rank_main` on each rank of a world of `size`, and waits for all of
/// them, like run_as_threads(): a rank that throws fails its peers, and the
/// cause is thrown. Processes all throw it, and have a longer time limit.
///
/// What is captured by reference is shared by threads, but each process has its
/// own: return results with results_of_ranks(), or use share_results().
void run_ranks(
    int size,
    const std::function<void(const World&)>& rank_main,
    std::chrono::milliseconds timeout = std::chrono::seconds(20));

/// The same; returns what those ranks return that run in this process, which
/// may be none.
template <class F>
auto results_of_ranks(
    int size,
    F&& rank_main,
    std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  std::mutex mutex;
  std::map<int, std::invoke_result_t<F&, const World&>> results; // by rank
  run_ranks(
      size,
      [&](const World& world) {
        auto result = rank_main(world);
        const std::lock_guard lock(mutex);
        results.emplace(world.rank(), std::move(result));
      },
      timeout);
  return results;
}

/// How many ranks of such a world run in this process.
int count_of_ranks_here(int size);

/// Hands all processes what rank r has put into by_rank[r] in the last
/// run_ranks(). Nothing to do for threads.
void share_results(std::vector<std::string>& by_rank);
void share_results(std::vector<double>& by_rank);

/// Sizes of the worlds that parity is tested in: 1 to 4, or what
/// FSDP_TEST_WORLD_SIZES says ("2,8").
std::vector<int> tested_world_sizes();

} // namespace fsdp::testing
