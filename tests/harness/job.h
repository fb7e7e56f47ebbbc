#pragma once

#include <fsdp/world.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

namespace fsdp::testing {

/// The processes that run this test program together.
///
/// [Note: Tests on processes] All processes run the same tests:
///
///   FSDP_TEST_WORLD=processes fsdp run -n 4 --backend shm -- test_models
///
/// A world of n ranks is split off for the first n of them; the others wait.
/// Processes stay in step although a test may take another path where something
/// has failed: each run, and the end of each test, is a meeting, to which every
/// process says where it is and whether it has failures. One that is elsewhere
/// than the rest throws, and so comes to the end of its test; there all wait
/// for each other. A failure in one process is a failure in all.
///
/// Rank 0 prints everything, the others failures only. Variables of this
/// program, such as GTEST_OUTPUT, are for rank 0.
class Job {
 public:
  /// Throws where FSDP_TEST_WORLD asks for no processes.
  static Job& current();

  /// Joins the job; there is one at a time. The largest worlds of most tests
  /// are of 4 ranks: throws std::runtime_error when there are fewer processes.
  Job();
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  int rank() const { return world_.rank(); }
  bool shares_memory() const { return shares_memory_; }

  /// The following are collective over all processes.
  void run_ranks(int size, const std::function<void(const World&)>& rank_main);
  void share(std::vector<std::string>& by_rank);
  void end_test();
  void shutdown() { world_.shutdown(); }

 private:
  struct Place {
    bool has_failure = false;
    std::string where;
    std::string payload;
  };

  /// Where all processes are, by rank.
  std::vector<Place> meet(const std::string& where, const std::string& payload);
  /// Throws where a process is elsewhere. Returns the payloads by rank.
  std::vector<std::string> meet_all(
      const std::string& where,
      const std::string& payload = "");
  bool has_ranks_for(int size);

  World world_;
  bool shares_memory_ = false;
  std::set<int> refused_; // sizes of worlds
};

/// Instead of InitGoogleTest() and RUN_ALL_TESTS(), whatever ranks are.
int run_all_tests(int argc, char** argv);

} // namespace fsdp::testing
