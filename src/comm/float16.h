#pragma once

#include <bit>
#include <cstdint>

namespace fsdp::detail {

// Bit-exact conversions of 16-bit floats, rounding to nearest even. A NaN stays
// a NaN with its sign and the upper bits of its payload. None depends on how
// the processor treats subnormal numbers. Written with selections, not
// branches, so that loops over them vectorise.

inline float float_from_float16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  const uint32_t normal = ((exponent + 112) << 23) | (mantissa << 13);
  const uint32_t special = 0x7f800000u | (mantissa << 13);
  const uint32_t subnormal = std::bit_cast<uint32_t>(
      static_cast<float>(static_cast<int32_t>(mantissa)) * 0x1p-24f);
  const uint32_t finite = exponent == 0 ? subnormal : normal;
  return std::bit_cast<float>(sign | (exponent == 31 ? special : finite));
}

inline uint16_t float16_from_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // A mantissa that overflows runs into the exponent, up to infinity.
  const uint32_t odd = (magnitude >> 13) & 1u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + odd) >> 13;
  // The units of 0.5f's last place are the float16 subnormals.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) -
      std::bit_cast<uint32_t>(0.5f);
  const uint32_t payload = (magnitude >> 13) & 0x3ffu;
  const uint32_t nan = 0x7c00u | (payload == 0 ? 0x200u : payload);
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal; // 2^-14
  result = magnitude >= 0x47800000u ? 0x7c00u : result;           // 2^16
  result = magnitude > 0x7f800000u ? nan : result;
  return static_cast<uint16_t>(sign | result);
}

inline float float_from_bfloat16(uint16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

inline uint16_t bfloat16_from_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t upper = bits >> 16;
  const uint32_t nan = (upper & 0x7fu) == 0 ? upper | 0x40u : upper;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(is_nan ? nan : rounded);
}

} // namespace fsdp::detail
