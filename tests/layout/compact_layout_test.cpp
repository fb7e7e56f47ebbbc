#include "layout/flat_layout.h"

#include "random_layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace fsdp::detail {
namespace {

using Cuts = std::vector<int64_t>;
using Flags = std::vector<bool>;
using Numels = std::vector<int64_t>;

Flags random_flags(std::mt19937_64& random, size_t size) {
  Flags flags;
  for (size_t i = 0; i < size; ++i) {
    flags.push_back(random_in(random, 0, 2) != 0);
  }
  return flags;
}

struct Element {
  int64_t index;
  int64_t offset; // inside the parameter
  int64_t rank;

  bool operator==(const Element&) const = default;
};

constexpr Element kPadding{-1, -1, -1};

void pad(std::vector<Element>& elements) {
  while (elements.size() % 64 != 0) {
    elements.push_back(kPadding);
  }
}

// The elements of the active parameters in order, with their owners.
std::vector<Element> reference_elements(
    const Numels& numels,
    const Flags& active,
    int64_t slice_numel) {
  std::vector<Element> elements;
  int64_t place = 0;
  for (size_t i = 0; i < numels.size(); ++i) {
    while (place % 64 != 0) {
      ++place;
    }
    for (int64_t n = 0; n < numels[i]; ++n, ++place) {
      if (active[i]) {
        elements.push_back({static_cast<int64_t>(i), n, place / slice_numel});
      }
    }
    pad(elements);
  }
  return elements;
}

TEST(CompactLayout, OfAllParametersIsTheLayout) {
  const FlatLayout layout(Numels{5, 7, 1}, 4);
  const CompactLayout compact(layout, Flags{true, true, true});
  EXPECT_EQ(compact.numel(), 192);
  EXPECT_EQ(compact.interval(0), (Interval{0, 5}));
  EXPECT_EQ(compact.interval(1), (Interval{64, 71}));
  EXPECT_EQ(compact.interval(2), (Interval{128, 129}));
  EXPECT_EQ(compact.cuts(), (Cuts{0, 64, 128, 192, 192}));
  EXPECT_EQ(compact.owned_in_part(1, 1), (Interval{0, 7}));
  EXPECT_EQ(compact.owned_in_part(1, 0), (Interval{0, 0}));
  EXPECT_EQ(compact.owned_in_part(2, 3), (Interval{0, 0}));
}

TEST(CompactLayout, SeveralParametersShareAPart) {
  const FlatLayout layout(Numels{5, 7, 1}, 2);
  const CompactLayout compact(layout, Flags{true, true, true});
  EXPECT_EQ(compact.cuts(), (Cuts{0, 128, 192}));
  EXPECT_EQ(compact.owned_in_part(1, 0), (Interval{64, 71}));
  EXPECT_EQ(compact.owned_in_part(2, 1), (Interval{0, 1}));
}

TEST(CompactLayout, InactiveParametersTakeNoPlace) {
  const FlatLayout layout(Numels{5, 7, 1}, 4);
  const CompactLayout compact(layout, Flags{true, false, true});
  EXPECT_EQ(compact.numel(), 128);
  EXPECT_EQ(compact.interval(1), (Interval{64, 64}));
  EXPECT_EQ(compact.interval(2), (Interval{64, 65}));
  EXPECT_EQ(compact.cuts(), (Cuts{0, 64, 64, 128, 128}));
  EXPECT_EQ(compact.owned_in_part(1, 1), (Interval{0, 0}));
  EXPECT_EQ(compact.owned_in_part(2, 2), (Interval{0, 1}));
}

TEST(CompactLayout, OneParameterSpansSeveralRanks) {
  const FlatLayout layout(Numels{10, 300}, 3); // cut at 128 and 256
  const CompactLayout compact(layout, Flags{true, true});
  EXPECT_EQ(compact.cuts(), (Cuts{0, 128, 256, 384}));
  EXPECT_EQ(compact.owned_in_part(1, 0), (Interval{64, 128}));
  EXPECT_EQ(compact.owned_in_part(1, 1), (Interval{0, 128}));
  EXPECT_EQ(compact.owned_in_part(1, 2), (Interval{0, 108}));
}

TEST(CompactLayout, WithoutActiveElementsAllPartsAreEmpty) {
  const FlatLayout layout(Numels{5, 0}, 3);
  for (const Flags& active : {Flags{false, false}, Flags{false, true}}) {
    const CompactLayout compact(layout, active);
    EXPECT_EQ(compact.numel(), 0);
    EXPECT_EQ(compact.cuts(), (Cuts{0, 0, 0, 0}));
    EXPECT_EQ(compact.owned_in_part(0, 0), (Interval{0, 0}));
  }
}

TEST(CompactLayout, OfNoParametersIsEmpty) {
  const CompactLayout compact(FlatLayout(Numels{}, 2), Flags{});
  EXPECT_EQ(compact.numel(), 0);
  EXPECT_EQ(compact.cuts(), (Cuts{0, 0, 0}));
}

TEST(CompactLayout, BillionsOfElementsDoNotOverflow) {
  constexpr int64_t kNumel = 2'000'000'001;
  const FlatLayout layout(Numels{kNumel, kNumel, kNumel}, 4);
  const CompactLayout compact(layout, Flags{true, false, true});
  constexpr int64_t kPadded = 2'000'000'064;
  EXPECT_EQ(compact.numel(), 2 * kPadded);
  EXPECT_EQ(
      compact.cuts(),
      (Cuts{0, 1'500'000'064, kPadded, 2'500'000'128, 2 * kPadded}));
}

TEST(CompactLayout, RejectsFlagsOfOtherParameters) {
  const FlatLayout layout(Numels{3, 4}, 2);
  expect_invalid(
      [&] { CompactLayout(layout, Flags{true}); },
      "CompactLayout: the number of flags differs from that of the "
      "parameters: expected 2, but got 1. ");
}

TEST(CompactLayout, RejectsUnknownParametersAndRanks) {
  const FlatLayout layout(Numels{3, 4}, 2);
  const CompactLayout compact(layout, Flags{true, true});
  const std::string expected =
      " is out of range: expected at least 0 and less than 2, but got ";
  expect_invalid(
      [&] { compact.interval(2); },
      "CompactLayout: the parameter index" + expected + "2. ");
  expect_invalid(
      [&] { compact.owned_in_part(-1, 0); },
      "CompactLayout: the parameter index" + expected + "-1. ");
  expect_invalid(
      [&] { compact.owned_in_part(0, 2); },
      "CompactLayout: the rank" + expected + "2. ");
}

TEST(CompactLayout, CutsCountWhatLiesBeforeEachSlice) {
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Numels numels = random_numels(random);
    const int world_size = static_cast<int>(random_in(random, 1, 9));
    const Flags active = random_flags(random, numels.size());
    const FlatLayout layout(numels, world_size);
    const CompactLayout compact(layout, active);

    Cuts cuts(static_cast<size_t>(world_size) + 1, 0);
    const std::vector<Element> elements =
        reference_elements(numels, active, layout.slice_numel());
    int64_t owner = 0; // of padding: that of the element before it
    for (const Element& element : elements) {
      owner = element == kPadding ? owner : element.rank;
      for (int64_t r = owner + 1; r <= world_size; ++r) {
        ++cuts.at(static_cast<size_t>(r));
      }
    }
    ASSERT_EQ(compact.cuts(), cuts);
    ASSERT_EQ(compact.numel(), static_cast<int64_t>(elements.size()));
  }
}

TEST(CompactLayout, IntervalsAndPartsHoldTheActiveElementsInOrder) {
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Numels numels = random_numels(random);
    const int world_size = static_cast<int>(random_in(random, 1, 9));
    const Flags active = random_flags(random, numels.size());
    const FlatLayout layout(numels, world_size);
    const CompactLayout compact(layout, active);

    // Each rank puts its owned parts into its part of the compact space.
    std::vector<Element> actual(static_cast<size_t>(compact.numel()), kPadding);
    for (int rank = 0; rank < world_size; ++rank) {
      const int64_t cut = compact.cuts().at(static_cast<size_t>(rank));
      for (int64_t index = 0; index < layout.size(); ++index) {
        const Interval in_part = compact.owned_in_part(index, rank);
        const Interval owned = layout.owned_of_parameter(index, rank);
        const bool takes_part = active[static_cast<size_t>(index)];
        ASSERT_EQ(in_part.numel(), takes_part ? owned.numel() : 0);
        for (int64_t n = 0; n < in_part.numel(); ++n) {
          const int64_t place = cut + in_part.begin + n;
          ASSERT_EQ(place, compact.interval(index).begin + owned.begin + n);
          actual.at(static_cast<size_t>(place)) = {
              index, owned.begin + n, rank};
        }
      }
    }
    ASSERT_EQ(actual, reference_elements(numels, active, layout.slice_numel()));
  }
}

} // namespace
} // namespace fsdp::detail
