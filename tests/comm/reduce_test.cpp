#include "comm/reduce.h"

#include "sample_data.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>

namespace fsdp::detail {
namespace {

std::vector<const std::byte*> pointers_to(const std::vector<Bytes>& inputs) {
  std::vector<const std::byte*> pointers;
  for (const Bytes& input : inputs) {
    pointers.push_back(input.data());
  }
  return pointers;
}

Bytes reduced(ReduceOp op, DType dtype, const std::vector<Bytes>& inputs) {
  Bytes output(inputs[0].size());
  reduce(
      op,
      dtype,
      pointers_to(inputs),
      output.data(),
      std::ssize(output) / size_of(dtype));
  return output;
}

template <class T>
std::vector<T> reduced_values(
    ReduceOp op,
    DType dtype,
    const std::vector<std::vector<T>>& inputs) {
  std::vector<Bytes> bytes;
  for (const auto& input : inputs) {
    bytes.push_back(bytes_of(input));
  }
  return values_of<T>(reduced(op, dtype, bytes));
}

TEST(Reduce, EqualsThePlainLoopForAllTypesAndLengths) {
  for (DType dtype : kAllDTypes) {
    for (int64_t numel : {0, 1, 3, 5, 7, 2048, 4095, 10007}) {
      std::vector<Bytes> inputs;
      for (uint64_t r = 0; r < 5; ++r) {
        inputs.push_back(sample(dtype, numel, r + 1));
        for (ReduceOp op : ops_of(dtype)) {
          ASSERT_EQ(
              reduced(op, dtype, inputs), reference_reduce(op, dtype, inputs))
              << "dtype " << static_cast<int>(dtype) << " numel " << numel
              << " ranks " << r + 1;
        }
      }
    }
  }
}

TEST(Reduce, OutputMayBeAContribution) {
  const DType dtype = DType::kFloat32;
  std::vector<Bytes> inputs;
  for (uint64_t r = 0; r < 3; ++r) {
    inputs.push_back(sample(dtype, 5000, r));
  }
  const Bytes expected = reference_reduce(ReduceOp::kSum, dtype, inputs);
  reduce(ReduceOp::kSum, dtype, pointers_to(inputs), inputs[1].data(), 5000);
  EXPECT_EQ(inputs[1], expected);
}

TEST(Reduce, PointersNeedNoAlignment) {
  const std::vector<Bytes> inputs = {
      sample(DType::kFloat64, 2100, 1), sample(DType::kFloat64, 2100, 2)};
  const Bytes expected =
      reference_reduce(ReduceOp::kSum, DType::kFloat64, inputs);
  std::vector<Bytes> shifted = inputs;
  for (Bytes& input : shifted) {
    input.insert(input.begin(), std::byte(0));
  }
  std::vector<const std::byte*> pointers = pointers_to(shifted);
  for (const std::byte*& pointer : pointers) {
    ++pointer;
  }
  Bytes output(expected.size() + 1);
  reduce(ReduceOp::kSum, DType::kFloat64, pointers, output.data() + 1, 2100);
  EXPECT_EQ(Bytes(output.begin() + 1, output.end()), expected);
}

TEST(Reduce, SumOfOneIsACopyOfItsBits) {
  // A signalling NaN, which arithmetic would change.
  const Bytes input = bytes_of(std::vector<uint32_t>{0x7f800001u, 0x80000000u});
  EXPECT_EQ(reduced(ReduceOp::kSum, DType::kFloat32, {input}), input);
}

TEST(Reduce, SumStartsFromTheFirstValue) {
  const auto sum = reduced_values<float>(
      ReduceOp::kSum, DType::kFloat32, {{-0.0f}, {-0.0f}});
  EXPECT_TRUE(std::signbit(sum[0]));
}

TEST(Reduce, SumIsInRankOrder) {
  const auto sum = reduced_values<float>(
      ReduceOp::kSum,
      DType::kFloat32,
      {{1e8f, 1.0f}, {1.0f, 1e8f}, {-1e8f, -1e8f}});
  EXPECT_EQ(sum, (std::vector<float>{0.0f, 0.0f}));
  const auto other = reduced_values<float>(
      ReduceOp::kSum, DType::kFloat32, {{1e8f}, {-1e8f}, {1.0f}});
  EXPECT_EQ(other[0], 1.0f);
}

TEST(Reduce, SixteenBitSumsAreRoundedOnce) {
  const uint16_t one = float16_from_float(1.0f);
  const uint16_t big = float16_from_float(2048.0f); // the next one is 2050
  const auto half = reduced_values<uint16_t>(
      ReduceOp::kSum, DType::kFloat16, {{big}, {one}, {one}});
  EXPECT_EQ(float_from_float16(half[0]), 2050.0f);
  const auto brain = reduced_values<uint16_t>(
      ReduceOp::kSum,
      DType::kBFloat16,
      {{bfloat16_from_float(256.0f)},
       {bfloat16_from_float(1.0f)},
       {bfloat16_from_float(1.0f)}});
  EXPECT_EQ(float_from_bfloat16(brain[0]), 258.0f);
}

TEST(Reduce, SixteenBitSumsMayPassThroughLargeValues) {
  const uint16_t big = float16_from_float(60000.0f);
  const uint16_t minus = float16_from_float(-60000.0f);
  const auto half = reduced_values<uint16_t>(
      ReduceOp::kSum, DType::kFloat16, {{big, big}, {big, big}, {minus, big}});
  EXPECT_EQ(half[0], big);
  EXPECT_TRUE(std::isinf(float_from_float16(half[1])));
}

TEST(Reduce, IntegerSumsWrapAround) {
  const int32_t max = std::numeric_limits<int32_t>::max();
  const auto sum = reduced_values<int32_t>(
      ReduceOp::kSum, DType::kInt32, {{max, -1}, {1, -1}});
  EXPECT_EQ(
      sum, (std::vector<int32_t>{std::numeric_limits<int32_t>::min(), -2}));
}

TEST(Reduce, MaxOfIntegersKnowsTheSign) {
  const auto max = reduced_values<int64_t>(
      ReduceOp::kMax, DType::kInt64, {{-5, 3}, {-7, 4}});
  EXPECT_EQ(max, (std::vector<int64_t>{-5, 4}));
}

TEST(Reduce, NanWinsTheMaximumFromEveryRank) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const auto max = reduced_values<float>(
      ReduceOp::kMax,
      DType::kFloat32,
      {{nan, 1, 1, -infinity}, {1, nan, 1, -2}, {infinity, 1, nan, -1}});
  EXPECT_TRUE(std::isnan(max[0]) && std::isnan(max[1]) && std::isnan(max[2]));
  EXPECT_EQ(max[3], -1.0f);
  const auto half = reduced_values<uint16_t>(
      ReduceOp::kMax,
      DType::kFloat16,
      {{float16_from_float(nan)}, {float16_from_float(infinity)}});
  EXPECT_TRUE(std::isnan(float_from_float16(half[0])));
}

TEST(Reduce, NothingToReduceIsAnError) {
  EXPECT_THROW(
      reduce(ReduceOp::kSum, DType::kInt32, {}, nullptr, 0),
      std::invalid_argument);
}

TEST(Reduce, SizesOfTypes) {
  EXPECT_EQ(size_of(DType::kFloat32), 4);
  EXPECT_EQ(size_of(DType::kFloat64), 8);
  EXPECT_EQ(size_of(DType::kFloat16), 2);
  EXPECT_EQ(size_of(DType::kBFloat16), 2);
  EXPECT_EQ(size_of(DType::kInt32), 4);
  EXPECT_EQ(size_of(DType::kInt64), 8);
}

} // namespace
} // namespace fsdp::detail
