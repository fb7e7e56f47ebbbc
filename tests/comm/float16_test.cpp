#include "comm/float16.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace fsdp::detail {
namespace {

// A binary format with `mantissa_bits` stored bits and the smallest normal
// exponent `min_exponent`; the largest exponent is its mirror plus one.
struct Format {
  int mantissa_bits;
  int min_exponent;
  float (*widen)(uint16_t);
  uint16_t (*narrow)(float);
};

constexpr Format kFloat16{10, -14, float_from_float16, float16_from_float};
constexpr Format kBFloat16{7, -126, float_from_bfloat16, bfloat16_from_float};

// The value of a pattern by its definition.
double defined_value(const Format& format, uint16_t pattern) {
  const int mantissa_size = 1 << format.mantissa_bits;
  const int mantissa = pattern % mantissa_size;
  const int exponent = (pattern & 0x7fff) / mantissa_size;
  const double sign = pattern & 0x8000 ? -1.0 : 1.0;
  if (exponent == 0) {
    return sign *
        std::ldexp(mantissa, format.min_exponent - format.mantissa_bits);
  }
  if (exponent == 0x7fff / mantissa_size) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  return sign *
      std::ldexp(
             mantissa_size + mantissa,
             exponent - 1 + format.min_exponent - format.mantissa_bits);
}

// `value` rounded to the format's nearest value, ties to even, in double.
double rounded(const Format& format, float value) {
  if (value == 0 || std::isinf(value)) {
    return value;
  }
  const int exponent = std::max(std::ilogb(value), format.min_exponent);
  const double unit = std::ldexp(1.0, exponent - format.mantissa_bits);
  const double result = std::nearbyint(value / unit) * unit;
  const double limit = std::ldexp(1.0, 2 - format.min_exponent);
  return std::abs(result) < limit
      ? result
      : std::copysign(std::numeric_limits<double>::infinity(), value);
}

void expect_rounds_to_nearest(const Format& format, float value) {
  const double expected = rounded(format, value);
  const double actual = format.widen(format.narrow(value));
  if (actual != expected || std::signbit(actual) != std::signbit(value)) {
    ADD_FAILURE() << std::hexfloat << value << " became " << actual
                  << ", expected " << expected;
  }
}

class Float16Formats : public testing::TestWithParam<Format> {};

TEST_P(Float16Formats, AllPatternsHaveTheirValueAndSurviveARoundTrip) {
  const Format format = GetParam();
  for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    const auto bits = static_cast<uint16_t>(pattern);
    const double expected = defined_value(format, bits);
    const float actual = format.widen(bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(actual)) << pattern;
    } else {
      ASSERT_EQ(actual, expected) << pattern;
    }
    ASSERT_EQ(std::signbit(actual), pattern >= 0x8000) << pattern;
    ASSERT_EQ(format.narrow(actual), pattern);
  }
}

TEST_P(Float16Formats, TiesAndTheirNeighboursRoundToNearestEven) {
  const Format format = GetParam();
  const float infinity = std::numeric_limits<float>::infinity();
  for (uint32_t pattern = 0; pattern < 0xffff; ++pattern) {
    const double low = defined_value(format, static_cast<uint16_t>(pattern));
    const double high =
        defined_value(format, static_cast<uint16_t>(pattern + 1));
    if (!std::isfinite(low) || !std::isfinite(high)) {
      continue;
    }
    const auto tie = static_cast<float>((low + high) / 2);
    expect_rounds_to_nearest(format, tie);
    expect_rounds_to_nearest(format, std::nextafter(tie, infinity));
    expect_rounds_to_nearest(format, std::nextafter(tie, -infinity));
  }
}

TEST_P(Float16Formats, RandomFloatsRoundToNearestEven) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> unit(-1, 1);
  const Format format = GetParam();
  for (int i = 0; i < 300000; ++i) {
    const auto any = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isnan(any)) {
      EXPECT_TRUE(std::isnan(format.widen(format.narrow(any))));
    } else {
      expect_rounds_to_nearest(format, any);
    }
    // Near the small end of float16, where any bits seldom lie.
    expect_rounds_to_nearest(format, std::ldexp(unit(random), -(i % 30)));
  }
}

TEST_P(Float16Formats, LimitsOfTheRange) {
  const Format format = GetParam();
  const float infinity = std::numeric_limits<float>::infinity();
  for (float value :
       {0.0f,
        65504.0f,
        65519.99f,
        65520.0f,
        65536.0f,
        0x1p-24f,
        0x1p-25f,
        0x1.000002p-25f,
        std::numeric_limits<float>::max(),
        std::numeric_limits<float>::denorm_min(),
        infinity}) {
    expect_rounds_to_nearest(format, value);
    expect_rounds_to_nearest(format, -value);
  }
}

TEST_P(Float16Formats, NanWithOnlyLowPayloadBitsStaysNan) {
  const Format format = GetParam();
  for (uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu}) {
    const uint16_t narrow = format.narrow(std::bit_cast<float>(bits));
    EXPECT_TRUE(std::isnan(defined_value(format, narrow))) << bits;
    EXPECT_EQ(narrow >> 15, bits >> 31);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Formats,
    Float16Formats,
    testing::Values(kFloat16, kBFloat16),
    [](const auto& format) {
      return format.param.mantissa_bits == 10 ? "Float16" : "BFloat16";
    });

} // namespace
} // namespace fsdp::detail
