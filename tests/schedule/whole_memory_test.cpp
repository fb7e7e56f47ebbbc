#include "schedule/whole_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

namespace fsdp::detail {
namespace {

using Pass = std::vector<UnitTouch>;
using Memory = std::vector<UnitMemory>;

TEST(WholeMemory, OfNoTouchesIsNothing) {
  EXPECT_EQ(peak_whole_bytes(Pass{}, Memory{{5}}, 2), 0);
}

TEST(WholeMemory, IsThatOfNeighboursWithTwoSlots) {
  const Memory units{{1}, {10}, {100}, {1000}};
  EXPECT_EQ(peak_whole_bytes(Pass{{0}, {3}, {1}, {2}}, units, 2), 1010);
  EXPECT_EQ(peak_whole_bytes(Pass{{0}, {3}, {1}, {2}}, units, 3), 1110);
  EXPECT_EQ(peak_whole_bytes(Pass{{0}, {3}, {1}, {2}}, units, 1), 1000);
  EXPECT_EQ(peak_whole_bytes(Pass{{0}, {1}}, units, 2), 11);
}

TEST(WholeMemory, OperatorHasItsUnitsTogether) {
  const Memory units{{1}, {10}, {100}};
  EXPECT_EQ(peak_whole_bytes(Pass{{0}, {1, true}, {2, true}}, units, 1), 111);
  EXPECT_EQ(peak_whole_bytes(Pass{{0}, {1, true}, {2}}, units, 1), 100);
  EXPECT_EQ(peak_whole_bytes(Pass{{0}, {1, true}, {0}}, units, 1), 11);
}

TEST(WholeMemory, KeptUnitsAddUp) {
  const Memory units{{1, true}, {10, true}, {100}, {1000}};
  EXPECT_EQ(peak_whole_bytes(Pass{{0}, {2}, {1}, {3}}, units, 1), 1011);
}

TEST(WholeMemory, PassesAfterTheFirstOneCountToo) {
  // The first pass never has A and B together, the second gathers B ahead.
  const Memory units{{1000}, {100}, {1}};
  EXPECT_EQ(peak_whole_bytes(Pass{{0}, {1}, {2, true}}, units, 2), 1100);
}

TEST(WholeMemory, RefusesWhatAScheduleRefuses) {
  EXPECT_THROW(
      peak_whole_bytes(Pass{{1}}, Memory{{5}}, 2), std::invalid_argument);
  EXPECT_THROW(
      peak_whole_bytes(Pass{{0}}, Memory{{5}}, 0), std::invalid_argument);
}

// A simulation of its own: sets, and the whole pass at hand.
class Simulation {
 public:
  Simulation(const Pass& pass, const Memory& units, size_t slots)
      : units_(units),
        slots_(slots) {
    for (const auto touch : pass) {
      if (!touch.joined) {
        operators_.emplace_back();
      }
      operators_.back().push_back(touch.unit);
    }
  }

  int64_t peak_bytes() {
    for (const bool recorded : {false, true}) {
      for (size_t i = 0; i < operators_.size(); ++i) {
        rest_.clear();
        for (size_t k = i + 1; recorded && k < operators_.size(); ++k) {
          rest_.insert(rest_.end(), operators_[k].begin(), operators_[k].end());
        }
        recorded_ = recorded;
        step(operators_[i]);
      }
      std::erase_if(whole_, [&](auto unit) { return !units_[unit].kept; });
    }
    return peak_bytes_;
  }

 private:
  void step(const std::vector<uint32_t>& read) {
    const auto places = slots_ > read.size() ? slots_ - read.size() : 0;
    std::set<uint32_t> stay(read.begin(), read.end());
    for (const auto unit : rest_) {
      if (stay.size() < read.size() + places &&
          !(units_[unit].kept && whole_.count(unit))) {
        stay.insert(unit);
      }
    }
    if (!std::includes(
            whole_.begin(), whole_.end(), stay.begin(), stay.end())) {
      release(stay, read.size() + places - stay.size());
    }
    whole_.insert(stay.begin(), stay.end());
    int64_t bytes = 0;
    for (const auto unit : whole_) {
      bytes += units_[unit].bytes;
    }
    peak_bytes_ = std::max(peak_bytes_, bytes);
    for (const auto unit : read) {
      std::erase(recent_, unit);
      recent_.push_back(unit);
    }
  }

  void release(const std::set<uint32_t>& stay, size_t places) {
    std::vector<uint32_t> others; // those that go first come first
    for (const bool over : {true, false}) {
      for (const auto unit : recent_) {
        const bool is_over = recorded_ &&
            std::find(rest_.begin(), rest_.end(), unit) == rest_.end();
        if (whole_.count(unit) && !stay.count(unit) && !units_[unit].kept &&
            is_over == over) {
          others.push_back(unit);
        }
      }
    }
    for (size_t i = 0; i + places < others.size(); ++i) {
      whole_.erase(others[i]);
    }
  }

  const Memory& units_;
  size_t slots_;
  std::vector<std::vector<uint32_t>> operators_;
  std::vector<uint32_t> rest_;   // what is expected
  std::vector<uint32_t> recent_; // the least recently touched first
  std::set<uint32_t> whole_;
  bool recorded_ = false;
  int64_t peak_bytes_ = 0;
};

Pass random_operators(std::mt19937_64& random, size_t units) {
  const auto below = [&](size_t count) { return random() % count; };
  Pass pass;
  for (size_t i = 1 + below(16); i > 0; --i) {
    std::vector<uint32_t> read(units);
    std::iota(read.begin(), read.end(), 0);
    std::shuffle(read.begin(), read.end(), random);
    const auto size = below(3) > 0 ? 1 : 1 + below(std::min<size_t>(units, 3));
    for (size_t k = 0; k < size; ++k) {
      pass.push_back({read[k], k > 0});
    }
  }
  return pass;
}

TEST(WholeMemory, IsThatOfASimulation) {
  for (uint64_t seed = 0; seed < 5000; ++seed) {
    std::mt19937_64 random(seed);
    Memory units(1 + random() % 6);
    for (size_t i = 0; i < units.size(); ++i) {
      // Powers: no two sets of units have the same size.
      units[i] = {int64_t{1} << (4 * i), random() % 5 == 0};
    }
    const auto pass = random_operators(random, units.size());
    const auto slots = 1 + random() % 4;
    ASSERT_EQ(
        peak_whole_bytes(pass, units, static_cast<int64_t>(slots)),
        Simulation(pass, units, slots).peak_bytes())
        << "seed " << seed;
  }
}

} // namespace
} // namespace fsdp::detail
