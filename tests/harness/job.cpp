#include "harness/job.h"

#include "harness/outcome.h"
#include "harness/ranks.h"
#include "runtime/errors.h"

#include <fsdp/init.h>

#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <memory>
#include <stdexcept>

namespace fsdp::testing {

namespace {

constexpr int kFewestProcesses = 4;
constexpr std::chrono::seconds kJobWaitLimit(60);

Job* current_job = nullptr;

std::string rank_name(int rank) {
  return "rank " + std::to_string(rank) + " of the job";
}

std::string encode(const Outcome& outcome) {
  return static_cast<char>(outcome.kind) + outcome.text;
}

Outcome decode(const std::string& bytes) {
  return {static_cast<Outcome::Kind>(bytes.at(0)), bytes.substr(1)};
}

} // namespace

Job& Job::current() {
  if (current_job == nullptr) {
    throw std::logic_error("this program does not call run_all_tests()");
  }
  return *current_job;
}

Job::Job() : world_(init({.timeout = kJobWaitLimit})) {
  if (world_.size() < kFewestProcesses) {
    throw std::runtime_error(
        "FSDP_TEST_WORLD=processes: expected at least 4 processes, but got " +
        std::to_string(world_.size()) +
        ". Start this program with fsdp run -n 4 -- ...");
  }
  const int64_t slice_bytes[] = {64};
  shares_memory_ = world_.communicator().share_slices(slice_bytes) != nullptr;
  current_job = this;
}

Job::~Job() {
  current_job = nullptr;
}

std::vector<Job::Place> Job::meet(
    const std::string& where,
    const std::string& payload) {
  const bool has_failure = ::testing::Test::HasFailure();
  std::vector<Place> places;
  for (const auto& answer : world_.communicator().exchange(
           (has_failure ? 'f' : '-') + where + '\n' + payload,
           "places of a test")) {
    const auto end = answer.find('\n');
    places.push_back(
        {answer.at(0) == 'f',
         answer.substr(1, end - 1),
         answer.substr(end + 1)});
  }
  for (size_t rank = 0; rank < places.size() && !has_failure; ++rank) {
    if (places[rank].has_failure) {
      ADD_FAILURE() << "see " << rank_name(static_cast<int>(rank));
      break;
    }
  }
  return places;
}

std::vector<std::string> Job::meet_all(
    const std::string& where,
    const std::string& payload) {
  const auto places = meet(where, payload);
  std::vector<std::string> payloads;
  for (size_t rank = 0; rank < places.size(); ++rank) {
    if (places[rank].where != where) {
      throw std::runtime_error(
          rank_name(world_.rank()) + " is at " + where + ", but " +
          rank_name(static_cast<int>(rank)) + " at " + places[rank].where);
    }
    payloads.push_back(places[rank].payload);
  }
  return payloads;
}

bool Job::has_ranks_for(int size) {
  if (size <= world_.size()) {
    return true;
  }
  if (refused_.insert(size).second && world_.rank() == 0) {
    std::cout << "not run: worlds of " << size << " ranks, since there are "
              << world_.size() << " processes" << std::endl;
  }
  return false;
}

void Job::run_ranks(
    int size,
    const std::function<void(const World&)>& rank_main) {
  if (!has_ranks_for(size)) {
    return;
  }
  meet_all("the start of a run of " + std::to_string(size) + " ranks");
  Outcome mine;
  {
    const bool takes_part = world_.rank() < size;
    const auto world = world_.split(takes_part ? 0 : 1, world_.rank());
    if (takes_part) {
      mine = run_rank(world, rank_main);
    }
  }
  std::vector<Outcome> outcomes;
  for (const auto& each : meet_all("the end of a run", encode(mine))) {
    outcomes.push_back(decode(each));
  }
  outcomes[static_cast<size_t>(world_.rank())] = mine;
  rethrow_first(outcomes);
}

void Job::share(std::vector<std::string>& by_rank) {
  const auto mine = static_cast<size_t>(world_.rank());
  const auto results = meet_all(
      "the results of a run", mine < by_rank.size() ? by_rank[mine] : "");
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    by_rank[rank] = results.at(rank);
  }
}

void Job::end_test() {
  const std::string where = "the end of a test";
  for (bool all = false; !all;) {
    all = true;
    for (const auto& place : meet(where, "")) {
      all = all && place.where == where;
    }
  }
}

namespace {

/// What is printed by all ranks but 0.
class FailurePrinter : public ::testing::EmptyTestEventListener {
 public:
  void OnTestStart(const ::testing::TestInfo& test) override {
    test_ = std::string(test.test_suite_name()) + '.' + test.name();
  }

  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (result.failed()) {
      const char* file = result.file_name();
      std::cout << test_ << ": " << (file == nullptr ? "" : file) << ':'
                << result.line_number() << ": " << result.message()
                << std::endl;
    }
  }

 private:
  std::string test_; // GoogleTest must not be asked while it reports a result
};

class TestBounds : public ::testing::EmptyTestEventListener {
 public:
  explicit TestBounds(Job& job) : job_(job) {}

  void OnTestStart(const ::testing::TestInfo& /*test*/) override {
    // Processes that did not take part in a run have drawn fewer numbers.
    at::manual_seed(1);
  }

  void OnTestEnd(const ::testing::TestInfo& test) override {
    try {
      job_.end_test();
    } catch (const std::exception& error) {
      // Without the others no test can go on.
      std::cerr << test.test_suite_name() << "." << test.name() << ": "
                << detail::text_of(error) << std::endl;
      std::_Exit(EXIT_FAILURE);
    }
  }

 private:
  Job& job_;
};

int run_in_job(int argc, char** argv) {
  Job job;
  if (job.rank() != 0) {
    GTEST_FLAG_SET(output, "");
  }
  ::testing::InitGoogleTest(&argc, argv);
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  if (job.rank() != 0) {
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailurePrinter);
  }
  listeners.Append(new TestBounds(job));
  const int status = RUN_ALL_TESTS();
  job.shutdown();
  return status;
}

} // namespace

int run_all_tests(int argc, char** argv) {
  try {
    if (are_processes()) {
      return run_in_job(argc, argv);
    }
    ::testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
  } catch (const std::exception& error) {
    std::cerr << detail::text_of(error) << std::endl;
    return EXIT_FAILURE;
  }
}

} // namespace fsdp::testing
