#pragma once

#include "comm/float16.h"

#include <fsdp/communicator.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace fsdp::detail {

using Bytes = std::vector<std::byte>;

inline constexpr DType kAllDTypes[] = {
    DType::kFloat32,
    DType::kFloat64,
    DType::kFloat16,
    DType::kBFloat16,
    DType::kInt32,
    DType::kInt64};

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  const auto* data = reinterpret_cast<const std::byte*>(values.data());
  return Bytes(data, data + values.size() * sizeof(T));
}

template <class T>
std::vector<T> values_of(const Bytes& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!bytes.empty()) {
    std::memcpy(values.data(), bytes.data(), bytes.size());
  }
  return values;
}

template <class T>
Bytes sample_of(int64_t numel, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<T> values(static_cast<size_t>(numel));
  for (T& value : values) {
    if constexpr (std::is_floating_point_v<T>) {
      value = std::uniform_real_distribution<T>(-100, 100)(random);
    } else {
      value = static_cast<T>(random());
    }
  }
  return bytes_of(values);
}

/// Random elements: reals of [-100, 100), integers of the whole range.
inline Bytes sample(DType dtype, int64_t numel, uint64_t seed) {
  const bool is_half = dtype == DType::kFloat16;
  if (is_half || dtype == DType::kBFloat16) {
    std::vector<uint16_t> halves;
    for (float value : values_of<float>(sample_of<float>(numel, seed))) {
      halves.push_back(
          is_half ? float16_from_float(value) : bfloat16_from_float(value));
    }
    return bytes_of(halves);
  }
  switch (dtype) {
    case DType::kFloat32:
      return sample_of<float>(numel, seed);
    case DType::kFloat64:
      return sample_of<double>(numel, seed);
    case DType::kInt32:
      return sample_of<uint32_t>(numel, seed);
    default:
      return sample_of<uint64_t>(numel, seed);
  }
}

/// The operations that a type has.
inline std::vector<ReduceOp> ops_of(DType dtype) {
  const bool is_integer = dtype == DType::kInt32 || dtype == DType::kInt64;
  return is_integer
      ? std::vector<ReduceOp>{ReduceOp::kSum, ReduceOp::kMax}
      : std::vector<ReduceOp>{ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMean};
}

/// Random bytes, for what moves bytes.
inline Bytes sample_bytes(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(static_cast<size_t>(count));
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(random());
  }
  return bytes;
}

// The plain reference: one element after the other, each over all ranks.
template <class Stored, class Wide, class Load, class Store>
Bytes reduce_plainly(
    ReduceOp op,
    const std::vector<Bytes>& inputs,
    Load load,
    Store store) {
  std::vector<std::vector<Stored>> all;
  for (const Bytes& input : inputs) {
    all.push_back(values_of<Stored>(input));
  }
  std::vector<Stored> results = all[0];
  for (size_t i = 0; i < results.size(); ++i) {
    Wide result = load(all[0][i]);
    for (size_t r = 1; r < all.size(); ++r) {
      const Wide next = load(all[r][i]);
      result = op == ReduceOp::kMax ? std::max(result, next) : result + next;
    }
    if (op == ReduceOp::kMean) {
      result /= static_cast<Wide>(all.size());
    }
    results[i] = store(result);
  }
  return bytes_of(results);
}

template <class Stored>
Bytes reduce_natively(ReduceOp op, const std::vector<Bytes>& inputs) {
  const auto same = [](Stored value) { return value; };
  return reduce_plainly<Stored, Stored>(op, inputs, same, same);
}

/// What reduce() must give, bit for bit, for inputs without NaN.
inline Bytes
reference_reduce(ReduceOp op, DType dtype, const std::vector<Bytes>& inputs) {
  const bool is_sum = op != ReduceOp::kMax;
  switch (dtype) {
    case DType::kFloat32:
      return reduce_natively<float>(op, inputs);
    case DType::kFloat64:
      return reduce_natively<double>(op, inputs);
    case DType::kFloat16:
      return reduce_plainly<uint16_t, float>(
          op, inputs, float_from_float16, float16_from_float);
    case DType::kBFloat16:
      return reduce_plainly<uint16_t, float>(
          op, inputs, float_from_bfloat16, bfloat16_from_float);
    case DType::kInt32:
      return is_sum ? reduce_natively<uint32_t>(op, inputs)
                    : reduce_natively<int32_t>(op, inputs);
    case DType::kInt64:
      return is_sum ? reduce_natively<uint64_t>(op, inputs)
                    : reduce_natively<int64_t>(op, inputs);
  }
  return {};
}

} // namespace fsdp::detail
