#include "layout/flat_layout.h"

#include "random_layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace fsdp::detail {
namespace {

using Numels = std::vector<int64_t>;

constexpr int64_t kPadding = -1;

// The parameter each element belongs to, or kPadding, up to the end of the
// last parameter: laid out element by element.
std::vector<int64_t> reference_elements(const Numels& numels) {
  std::vector<int64_t> elements;
  for (size_t i = 0; i < numels.size(); ++i) {
    while (elements.size() % 64 != 0) {
      elements.push_back(kPadding);
    }
    for (int64_t n = 0; n < numels[i]; ++n) {
      elements.push_back(static_cast<int64_t>(i));
    }
  }
  return elements;
}

int64_t reference_slice_numel(int64_t end, int world_size) {
  int64_t slice_numel = 0;
  while (world_size * slice_numel < end) {
    slice_numel += 64;
  }
  return slice_numel;
}

TEST(Interval, IntersectionIsTheCommonPart) {
  EXPECT_EQ(intersect(Interval{0, 10}, Interval{3, 20}), (Interval{3, 10}));
  EXPECT_EQ(intersect(Interval{3, 20}, Interval{0, 10}), (Interval{3, 10}));
  EXPECT_EQ(intersect(Interval{0, 10}, Interval{4, 6}), (Interval{4, 6}));
}

TEST(Interval, IntersectionOfDisjointIntervalsIsEmptyAtTheLaterBegin) {
  EXPECT_EQ(intersect(Interval{0, 5}, Interval{10, 20}), (Interval{10, 10}));
  EXPECT_EQ(intersect(Interval{10, 20}, Interval{0, 5}), (Interval{10, 10}));
  EXPECT_EQ(intersect(Interval{0, 5}, Interval{5, 9}), (Interval{5, 5}));
  EXPECT_EQ(intersect(Interval{2, 2}, Interval{0, 9}), (Interval{2, 2}));
}

TEST(FlatLayout, SmallParametersStartAtTheAlignment) {
  const FlatLayout layout(Numels{5, 7, 1}, 4);
  EXPECT_EQ(layout.size(), 3);
  EXPECT_EQ(layout.world_size(), 4);
  EXPECT_EQ(layout.interval(0), (Interval{0, 5}));
  EXPECT_EQ(layout.interval(1), (Interval{64, 71}));
  EXPECT_EQ(layout.interval(2), (Interval{128, 129}));
  EXPECT_EQ(layout.slice_numel(), 64);
  EXPECT_EQ(layout.total_numel(), 256);
  EXPECT_EQ(layout.slice(3), (Interval{192, 256}));
  EXPECT_EQ(layout.owned_of_parameter(1, 1), (Interval{0, 7}));
  EXPECT_EQ(layout.owned_in_slice(1, 1), (Interval{0, 7}));
  EXPECT_EQ(layout.owned_in_slice(2, 2), (Interval{0, 1}));
}

TEST(FlatLayout, PartsThatARankDoesNotOwnAreEmptyAtZero) {
  const FlatLayout layout(Numels{5, 7, 1}, 4);
  for (int64_t index = 0; index < 3; ++index) {
    EXPECT_EQ(layout.owned_of_parameter(index, 3), (Interval{0, 0}));
    EXPECT_EQ(layout.owned_in_slice(index, 3), (Interval{0, 0}));
  }
  EXPECT_EQ(layout.owned_of_parameter(2, 0), (Interval{0, 0}));
  EXPECT_EQ(layout.owned_in_slice(0, 2), (Interval{0, 0}));
}

TEST(FlatLayout, SeveralParametersShareASlice) {
  const FlatLayout layout(Numels{5, 7, 1}, 2);
  EXPECT_EQ(layout.slice_numel(), 128);
  EXPECT_EQ(layout.owned_in_slice(0, 0), (Interval{0, 5}));
  EXPECT_EQ(layout.owned_in_slice(1, 0), (Interval{64, 71}));
  EXPECT_EQ(layout.owned_in_slice(2, 1), (Interval{0, 1}));
}

TEST(FlatLayout, OneParameterSpansSeveralRanks) {
  const FlatLayout layout(Numels{300}, 3);
  EXPECT_EQ(layout.slice_numel(), 128);
  EXPECT_EQ(layout.owned_of_parameter(0, 0), (Interval{0, 128}));
  EXPECT_EQ(layout.owned_of_parameter(0, 1), (Interval{128, 256}));
  EXPECT_EQ(layout.owned_of_parameter(0, 2), (Interval{256, 300}));
  EXPECT_EQ(layout.owned_in_slice(0, 1), (Interval{0, 128}));
  EXPECT_EQ(layout.owned_in_slice(0, 2), (Interval{0, 44}));
}

TEST(FlatLayout, FewerElementsThanRanksAllLieOnTheFirst) {
  const FlatLayout layout(Numels{3}, 8);
  EXPECT_EQ(layout.slice_numel(), 64);
  EXPECT_EQ(layout.total_numel(), 512);
  EXPECT_EQ(layout.owned_of_parameter(0, 0), (Interval{0, 3}));
  for (int rank = 1; rank < 8; ++rank) {
    EXPECT_TRUE(layout.owned_of_parameter(0, rank).empty());
  }
}

TEST(FlatLayout, AFullAlignmentNeedsNoPadding) {
  const FlatLayout layout(Numels{64, 128, 64}, 4);
  EXPECT_EQ(layout.interval(1), (Interval{64, 192}));
  EXPECT_EQ(layout.slice_numel(), 64);
  EXPECT_EQ(layout.total_numel(), 256);
}

TEST(FlatLayout, WithoutElementsSlicesAreEmpty) {
  for (const Numels& numels : {Numels{}, Numels{0}, Numels{0, 0, 0}}) {
    const FlatLayout layout(numels, 4);
    EXPECT_EQ(layout.size(), static_cast<int64_t>(numels.size()));
    EXPECT_EQ(layout.slice_numel(), 0);
    EXPECT_EQ(layout.total_numel(), 0);
    EXPECT_EQ(layout.slice(3), (Interval{0, 0}));
    for (int64_t index = 0; index < layout.size(); ++index) {
      EXPECT_EQ(layout.interval(index), (Interval{0, 0}));
      EXPECT_EQ(layout.owned_in_slice(index, 3), (Interval{0, 0}));
    }
  }
}

TEST(FlatLayout, ParametersWithoutElementsTakeNoPlace) {
  const FlatLayout layout(Numels{0, 5, 0, 0, 7, 0}, 2);
  EXPECT_EQ(layout.interval(0), (Interval{0, 0}));
  EXPECT_EQ(layout.interval(1), (Interval{0, 5}));
  EXPECT_EQ(layout.interval(2), (Interval{64, 64}));
  EXPECT_EQ(layout.interval(3), (Interval{64, 64}));
  EXPECT_EQ(layout.interval(4), (Interval{64, 71}));
  EXPECT_EQ(layout.interval(5), (Interval{128, 128}));
  EXPECT_EQ(layout.slice_numel(), 64);
}

TEST(FlatLayout, BillionsOfElementsDoNotOverflow) {
  constexpr int64_t kNumel = 2'000'000'001;
  const FlatLayout layout(Numels{kNumel, kNumel, kNumel}, 4);
  EXPECT_EQ(layout.interval(1), (Interval{2'000'000'064, 4'000'000'065}));
  EXPECT_EQ(layout.interval(2), (Interval{4'000'000'128, 6'000'000'129}));
  EXPECT_EQ(layout.slice_numel(), 1'500'000'064);
  EXPECT_EQ(layout.total_numel(), 6'000'000'256);
  EXPECT_EQ(layout.slice(3), (Interval{4'500'000'192, 6'000'000'256}));
  EXPECT_EQ(layout.owned_of_parameter(2, 3), (Interval{500'000'064, kNumel}));
  EXPECT_EQ(layout.owned_in_slice(2, 3), (Interval{0, 1'499'999'937}));
}

TEST(FlatLayout, TheLargestSumIsAcceptedOnTheMostRanks) {
  constexpr int64_t kHalf = int64_t{1} << 61;
  constexpr int kRanks = std::numeric_limits<int>::max();
  const FlatLayout layout(Numels{kHalf, kHalf}, kRanks);
  EXPECT_EQ(layout.interval(1), (Interval{kHalf, 2 * kHalf}));
  EXPECT_GE(layout.slice(kRanks - 1).end, 2 * kHalf);
}

TEST(FlatLayout, RejectsCountsItCannotLayOut) {
  constexpr int64_t kHalf = int64_t{1} << 61;
  expect_invalid(
      [] {
        FlatLayout(Numels{3, -2}, 2);
      },
      "FlatLayout: the element count of parameter 1 is negative: expected at "
      "least 0, but got -2. ");
  expect_invalid(
      [] {
        FlatLayout(Numels{kHalf, kHalf + 1}, 2);
      },
      "FlatLayout: the element count of parameter 1 is too large: expected at "
      "most 2305843009213693952 after the parameters before it, but got "
      "2305843009213693953. ");
}

TEST(FlatLayout, RejectsAWorldWithoutRanks) {
  for (const int world_size : {0, -3}) {
    expect_invalid(
        [&] { FlatLayout(Numels{3}, world_size); },
        "FlatLayout: the world size is too small: expected at least 1, but "
        "got " +
            std::to_string(world_size) + ". ");
  }
}

TEST(FlatLayout, RejectsUnknownParametersAndRanks) {
  const FlatLayout layout(Numels{3, 4}, 2);
  const std::string index = "FlatLayout: the parameter index is out of range: ";
  const std::string rank = "FlatLayout: the rank is out of range: ";
  const std::string expected = "expected at least 0 and less than 2, but got ";
  expect_invalid([&] { layout.interval(2); }, index + expected + "2. ");
  expect_invalid([&] { layout.interval(-1); }, index + expected + "-1. ");
  expect_invalid([&] { layout.slice(2); }, rank + expected + "2. ");
  expect_invalid([&] { layout.slice(-1); }, rank + expected + "-1. ");
  expect_invalid([&] { layout.owned_of_parameter(5, 0); }, index);
  expect_invalid([&] { layout.owned_in_slice(0, 5); }, rank);
}

TEST(FlatLayout, MatchesALayoutMadeElementByElement) {
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Numels numels = random_numels(random);
    const int world_size = static_cast<int>(random_in(random, 1, 9));
    const FlatLayout layout(numels, world_size);

    std::vector<int64_t> elements = reference_elements(numels);
    const int64_t slice_numel = reference_slice_numel(
        static_cast<int64_t>(elements.size()), world_size);
    elements.resize(static_cast<size_t>(world_size * slice_numel), kPadding);
    ASSERT_EQ(layout.slice_numel(), slice_numel);
    ASSERT_EQ(layout.total_numel(), world_size * slice_numel);

    std::vector<int64_t> actual(elements.size(), kPadding);
    for (int64_t index = 0; index < layout.size(); ++index) {
      const Interval whole = layout.interval(index);
      ASSERT_EQ(whole.numel(), numels[static_cast<size_t>(index)]);
      ASSERT_EQ(whole.begin % 64, 0);
      for (int64_t n = whole.begin; n < whole.end; ++n) {
        actual.at(static_cast<size_t>(n)) = index;
      }
    }
    ASSERT_EQ(actual, elements);
  }
}

TEST(FlatLayout, SlicesCoverTheIndexSpaceInRankOrder) {
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Numels numels = random_numels(random);
    const int world_size = static_cast<int>(random_in(random, 1, 9));
    const FlatLayout layout(numels, world_size);
    int64_t end = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      ASSERT_EQ(layout.slice(rank).begin, end);
      end = layout.slice(rank).end;
      ASSERT_EQ(end % 64, 0);
    }
    ASSERT_EQ(end, layout.total_numel());
  }
}

TEST(FlatLayout, EveryElementHasExactlyOneOwner) {
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Numels numels = random_numels(random);
    const int world_size = static_cast<int>(random_in(random, 1, 9));
    const FlatLayout layout(numels, world_size);
    for (int64_t index = 0; index < layout.size(); ++index) {
      const int64_t numel = numels[static_cast<size_t>(index)];
      std::vector<int> owners(static_cast<size_t>(numel), 0);
      for (int rank = 0; rank < world_size; ++rank) {
        const Interval owned = layout.owned_of_parameter(index, rank);
        for (int64_t n = owned.begin; n < owned.end; ++n) {
          ++owners.at(static_cast<size_t>(n));
        }
      }
      ASSERT_EQ(owners, std::vector<int>(static_cast<size_t>(numel), 1));
    }
  }
}

TEST(FlatLayout, BothViewsOfAnOwnedPartAreTheSameElements) {
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Numels numels = random_numels(random);
    const int world_size = static_cast<int>(random_in(random, 1, 9));
    const FlatLayout layout(numels, world_size);
    for (int64_t index = 0; index < layout.size(); ++index) {
      for (int rank = 0; rank < world_size; ++rank) {
        const Interval of_parameter = layout.owned_of_parameter(index, rank);
        const Interval in_slice = layout.owned_in_slice(index, rank);
        ASSERT_EQ(of_parameter.numel(), in_slice.numel());
        if (of_parameter.empty()) {
          ASSERT_EQ(of_parameter, (Interval{0, 0}));
          ASSERT_EQ(in_slice, (Interval{0, 0}));
          continue;
        }
        ASSERT_EQ(
            layout.interval(index).begin + of_parameter.begin,
            layout.slice(rank).begin + in_slice.begin);
        ASSERT_GE(in_slice.begin, 0);
        ASSERT_LE(in_slice.end, layout.slice_numel());
      }
    }
  }
}

} // namespace
} // namespace fsdp::detail
