// Random programs: ScheduleRun checks every decision of them.

#include "schedule_run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace fsdp::detail {
namespace {

using Operators = std::vector<Units>;

class RandomProgram {
 public:
  explicit RandomProgram(uint64_t seed)
      : random_(seed),
        units_(static_cast<uint32_t>(1 + below(8))),
        slots_(static_cast<int64_t>(1 + below(4))),
        run_(units_, slots_) {
    for (int i = 0; i < 3; ++i) {
      habits_.push_back(operators(3));
    }
  }

  size_t below(size_t count) { return random_() % count; }
  bool one_in(size_t count) { return below(count) == 0; }
  int64_t slots() const { return slots_; }
  ScheduleRun& run() { return run_; }

  /// All decisions of a few passes.
  std::string passes() {
    std::string text;
    for (size_t i = 5 + below(10); i > 0; --i) {
      change_settings();
      run_.begin(one_in(2) ? PassKind::kForward : PassKind::kBackward);
      const auto pass = next_pass();
      for (size_t k = 0; k < pass.size(); ++k) {
        text += run_operator(pass[k], 0) + " | ";
        if (one_in(100)) {
          text += run_.fail() + " || ";
          run_.begin(PassKind::kForward); // caught inside of the region
        }
      }
      text += one_in(15) ? run_.fail() : one_in(8) ? "" : run_.end();
      text += "\n";
    }
    return text + run_.end();
  }

  /// Nothing kept and no rules.
  void clear_settings() {
    for (uint32_t unit = 0; unit < units_; ++unit) {
      run_.keep(unit, false);
      run_.schedule().set_prefetch(PassKind::kForward, unit, {});
    }
    run_.end();
  }

  /// Each reads up to `most` different units.
  Operators operators(size_t most) {
    Operators pass(1 + below(14));
    std::vector<uint32_t> units(units_);
    std::iota(units.begin(), units.end(), 0);
    for (auto& read : pass) {
      std::shuffle(units.begin(), units.end(), random_);
      const auto size =
          one_in(3) ? 1 + below(std::min<size_t>(most, units_)) : 1;
      read.assign(
          units.begin(), units.begin() + static_cast<std::ptrdiff_t>(size));
    }
    return pass;
  }

 private:
  void change_settings() {
    const auto unit = static_cast<uint32_t>(below(units_));
    if (one_in(4)) {
      run_.keep(unit, one_in(2));
    }
    if (one_in(6)) {
      run_.schedule().set_prefetch(
          one_in(2) ? PassKind::kForward : PassKind::kBackward,
          unit,
          one_in(3) ? Units{} : operators(3).front());
    }
    if (one_in(8)) {
      run_.set_whole(unit, one_in(2));
    }
  }

  // Mostly one of the program's habits, with departures now and then.
  Operators next_pass() {
    auto pass = one_in(10) ? operators(3) : habits_[below(habits_.size())];
    for (size_t i = below(3); one_in(3) && i > 0 && !pass.empty(); --i) {
      const auto at =
          pass.begin() + static_cast<std::ptrdiff_t>(below(pass.size()));
      if (one_in(2)) {
        pass.erase(at);
      } else {
        pass.insert(at, operators(3).front());
      }
    }
    return pass;
  }

  // Operators run inside of others: their units have pins meanwhile.
  std::string run_operator(const Units& units, int depth) {
    auto read = units;
    if (one_in(10)) {
      read.push_back(read.front());
    }
    auto text = run_.open(read);
    if (depth < 3 && one_in(8)) {
      text += " (" + run_operator(operators(2).front(), depth + 1) + ")";
    }
    run_.close(read);
    return text;
  }

  std::mt19937_64 random_;
  uint32_t units_;
  int64_t slots_;
  ScheduleRun run_;
  std::vector<Operators> habits_;
};

TEST(RandomSchedule, KeepsTheRulesAndIsTheSameOnAllRanks) {
  for (uint64_t seed = 0; seed < 4000 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const auto decisions = RandomProgram(seed).passes();
    EXPECT_EQ(decisions, RandomProgram(seed).passes());
  }
}

// How many gathers operators after the first one wait for from their beginning.
int late_gathers(ScheduleRun& run, const Operators& pass) {
  run.begin(PassKind::kForward);
  int late = 0;
  for (size_t i = 0; i < pass.size(); ++i) {
    const auto before = run.gathers_at_touch();
    run.open(pass[i]);
    run.close(pass[i]);
    late += i > 0 ? run.gathers_at_touch() - before : 0;
  }
  run.end();
  return late;
}

TEST(RandomSchedule, RepeatedPassGathersAllButTheFirstAheadWhateverWasBefore) {
  int longest = 0;
  for (uint64_t seed = 0; seed < 4000 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomProgram program(seed);
    program.passes();
    program.clear_settings();
    const auto most = static_cast<size_t>(program.slots()) / 2;
    if (most == 0) {
      continue; // one slot: nothing can be gathered ahead
    }
    const auto pass = program.operators(most);
    longest = std::max(longest, late_gathers(program.run(), pass));
    EXPECT_EQ(late_gathers(program.run(), pass), 0);
  }
  EXPECT_GT(longest, 5) << "the passes are too easy";
}

} // namespace
} // namespace fsdp::detail
