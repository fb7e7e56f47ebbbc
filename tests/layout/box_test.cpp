#include "layout/box.h"

#include "random_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace fsdp::detail {
namespace {

using Boxes = std::vector<Box>;
using Sizes = std::vector<int64_t>;

// The flat indices of a box's elements, in row-major order: a walk over all
// elements of the array that keeps those inside.
Sizes elements_of(const Box& box, const Sizes& sizes) {
  Sizes elements;
  Sizes at(sizes.size(), 0);
  const int64_t numel = std::accumulate(
      sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  for (int64_t n = 0; n < numel; ++n) {
    bool inside = true;
    for (size_t d = 0; d < sizes.size(); ++d) {
      inside = inside && at[d] >= box.offsets.at(d) &&
          at[d] < box.offsets.at(d) + box.sizes.at(d);
    }
    if (inside) {
      elements.push_back(n);
    }
    for (size_t d = sizes.size(); d-- > 0;) {
      if (++at[d] < sizes[d]) {
        break;
      }
      at[d] = 0;
    }
  }
  return elements;
}

// 0 to 5 dimensions, often of size 1 and sometimes 0.
Sizes random_sizes(std::mt19937_64& random) {
  Sizes sizes(static_cast<size_t>(random_in(random, 0, 5)));
  for (int64_t& size : sizes) {
    size = std::max<int64_t>(random_in(random, -1, 5), 1);
    if (random_in(random, 0, 29) == 0) {
      size = 0;
    }
  }
  return sizes;
}

Interval random_interval(std::mt19937_64& random, int64_t numel) {
  const int64_t begin = random_in(random, 0, numel);
  return {begin, random_in(random, begin, numel)};
}

Box random_box(std::mt19937_64& random, const Sizes& sizes) {
  Box box;
  for (const int64_t size : sizes) {
    const Interval part = random_interval(random, size);
    box.offsets.push_back(part.begin);
    box.sizes.push_back(part.numel());
  }
  return box;
}

TEST(Box, NumelIsTheProductOfTheSizes) {
  EXPECT_EQ((Box{{1, 0, 2}, {2, 3, 4}}).numel(), 24);
  EXPECT_EQ((Box{{1, 0}, {2, 0}}).numel(), 0);
  EXPECT_EQ(Box{}.numel(), 1);
}

TEST(BoxesOf, AWholeArrayIsOneBox) {
  EXPECT_EQ(boxes_of({0, 24}, Sizes{2, 3, 4}), (Boxes{{{0, 0, 0}, {2, 3, 4}}}));
}

TEST(BoxesOf, AVectorIsOneBox) {
  EXPECT_EQ(boxes_of({3, 8}, Sizes{10}), (Boxes{{{3}, {5}}}));
}

TEST(BoxesOf, AScalarIsOneBox) {
  EXPECT_EQ(boxes_of({0, 1}, Sizes{}), (Boxes{Box{}}));
}

TEST(BoxesOf, AnEmptyIntervalHasNoBox) {
  EXPECT_TRUE(boxes_of({0, 0}, Sizes{2, 3}).empty());
  EXPECT_TRUE(boxes_of({6, 6}, Sizes{2, 3}).empty());
  EXPECT_TRUE(boxes_of({0, 0}, Sizes{2, 0}).empty());
  EXPECT_TRUE(boxes_of({0, 0}, Sizes{}).empty());
}

TEST(BoxesOf, AMatrixCutInsideTwoRowsIsThreeBoxes) {
  EXPECT_EQ(
      boxes_of({3, 18}, Sizes{5, 4}),
      (Boxes{{{0, 3}, {1, 1}}, {{1, 0}, {3, 4}}, {{4, 0}, {1, 2}}}));
}

TEST(BoxesOf, PartsOfTwoRowsAreTwoBoxes) {
  EXPECT_EQ(
      boxes_of({1, 7}, Sizes{5, 4}),
      (Boxes{{{0, 1}, {1, 3}}, {{1, 0}, {1, 3}}}));
}

TEST(BoxesOf, WholeRowsAreOneBox) {
  EXPECT_EQ(boxes_of({4, 16}, Sizes{5, 4}), (Boxes{{{1, 0}, {3, 4}}}));
}

TEST(BoxesOf, ThreeDimensionsNeedUpToFiveBoxes) {
  EXPECT_EQ(
      boxes_of({1, 26}, Sizes{3, 3, 3}),
      (Boxes{
          {{0, 0, 1}, {1, 1, 2}},
          {{0, 1, 0}, {1, 2, 3}},
          {{1, 0, 0}, {1, 3, 3}},
          {{2, 0, 0}, {1, 2, 3}},
          {{2, 2, 0}, {1, 1, 2}}}));
}

TEST(BoxesOf, BillionsOfElementsDoNotOverflow) {
  EXPECT_EQ(
      boxes_of({1, 2'499'999'999}, Sizes{50'000, 50'000}),
      (Boxes{
          {{0, 1}, {1, 49'999}},
          {{1, 0}, {49'998, 50'000}},
          {{49'999, 0}, {1, 49'999}}}));
}

TEST(BoxesOf, RejectsIntervalsOutsideTheArray) {
  const std::string text =
      "boxes_of: the interval does not lie inside the array of shape [2, 3]: "
      "expected part of [0, 6), but got ";
  const Sizes sizes{2, 3};
  expect_invalid([&] { boxes_of({-1, 3}, sizes); }, text + "[-1, 3). ");
  expect_invalid([&] { boxes_of({4, 7}, sizes); }, text + "[4, 7). ");
  expect_invalid([&] { boxes_of({7, 7}, sizes); }, text + "[7, 7). ");
  expect_invalid([&] { boxes_of({3, 2}, sizes); }, text + "[3, 2). ");
  expect_invalid(
      [] {
        boxes_of({0, 2}, Sizes{});
      },
      "of shape []: expected part of [0, 1)");
  expect_invalid([] { boxes_of({0, 1}, Sizes{0}); }, "expected part of [0, 0)");
}

TEST(BoxesOf, RejectsShapesThatNoArrayHas) {
  constexpr int64_t kLarge = int64_t{1} << 40;
  expect_invalid(
      [] {
        boxes_of({0, 0}, Sizes{0, -2});
      },
      "boxes_of: a size of the shape [0, -2] is negative: expected at least "
      "0, but got -2. ");
  expect_invalid(
      [] {
        boxes_of({0, 0}, Sizes{kLarge, kLarge});
      },
      "boxes_of: the array is too large: expected at most "
      "9223372036854775807 elements, but got the shape [1099511627776, "
      "1099511627776]. ");
  EXPECT_TRUE(boxes_of({0, 0}, Sizes{kLarge, kLarge, 0}).empty());
}

TEST(BoxesOf, BoxesHoldExactlyTheIntervalInOrder) {
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Sizes sizes = random_sizes(random);
    const Box whole{Sizes(sizes.size(), 0), sizes};
    const auto numel = static_cast<int64_t>(elements_of(whole, sizes).size());
    const Interval interval = random_interval(random, numel);
    const Boxes boxes = boxes_of(interval, sizes);

    Sizes expected(static_cast<size_t>(interval.numel()));
    std::iota(expected.begin(), expected.end(), interval.begin);
    Sizes actual;
    for (const Box& box : boxes) {
      const Sizes elements = elements_of(box, sizes);
      ASSERT_FALSE(elements.empty());
      ASSERT_EQ(box.numel(), static_cast<int64_t>(elements.size()));
      actual.insert(actual.end(), elements.begin(), elements.end());
    }
    ASSERT_EQ(actual, expected);
    ASSERT_LE(boxes.size(), std::max<size_t>(2 * sizes.size(), 2) - 1);
  }
}

TEST(BoxesOf, BoxesDoNotOverlap) {
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Sizes sizes = random_sizes(random);
    const Interval interval =
        random_interval(random, Box{Sizes(sizes.size(), 0), sizes}.numel());
    std::set<int64_t> seen;
    for (const Box& box : boxes_of(interval, sizes)) {
      for (const int64_t element : elements_of(box, sizes)) {
        ASSERT_TRUE(seen.insert(element).second) << "element " << element;
      }
    }
  }
}

TEST(BoxIntersection, IsTheCommonPart) {
  const Box a{{0, 1}, {3, 4}};
  const Box b{{2, 0}, {4, 3}};
  EXPECT_EQ(intersect(a, b), (Box{{2, 1}, {1, 2}}));
  EXPECT_EQ(intersect(b, a), (Box{{2, 1}, {1, 2}}));
}

TEST(BoxIntersection, OfDisjointBoxesHasNoElements) {
  EXPECT_EQ(intersect(Box{{0}, {2}}, Box{{2}, {3}}).numel(), 0);
  EXPECT_EQ(intersect(Box{{0, 0}, {2, 2}}, Box{{5, 5}, {2, 2}}).numel(), 0);
  EXPECT_EQ(intersect(Box{{0, 0}, {2, 2}}, Box{{1, 5}, {2, 2}}).numel(), 0);
}

TEST(BoxIntersection, OfScalarsIsTheScalar) {
  EXPECT_EQ(intersect(Box{}, Box{}), Box{});
}

TEST(BoxIntersection, RejectsBoxesOfDifferentArrays) {
  expect_invalid(
      [] {
        intersect(Box{{0, 0}, {1, 1}}, Box{{0}, {1}});
      },
      "intersect: the boxes are not of one array: expected 2 dimensions, but "
      "got 1. ");
}

TEST(BoxIntersection, MatchesTheCommonElements) {
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Sizes sizes = random_sizes(random);
    const Box a = random_box(random, sizes);
    const Box b = random_box(random, sizes);
    const Sizes in_a = elements_of(a, sizes);
    const Sizes in_b = elements_of(b, sizes);
    Sizes expected;
    std::set_intersection(
        in_a.begin(),
        in_a.end(),
        in_b.begin(),
        in_b.end(),
        std::back_inserter(expected));
    const Box common = intersect(a, b);
    const Box reversed = intersect(b, a);
    ASSERT_EQ(elements_of(common, sizes), expected);
    ASSERT_EQ(common.numel(), static_cast<int64_t>(expected.size()));
    ASSERT_EQ(reversed, common);
  }
}

} // namespace
} // namespace fsdp::detail
