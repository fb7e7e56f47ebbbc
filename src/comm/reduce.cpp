#include "comm/reduce.h"

#include "comm/float16.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace fsdp::detail {
namespace {

// Elements that are reduced together: contribution after contribution is added
// to a block that stays in the first-level cache.
constexpr int64_t kBlockNumel = 2048;

// How an element type is stored and in which type it is reduced.

template <class T>
struct Native {
  using Stored = T;
  using Wide = T;
  static Wide load(Stored value) { return value; }
  static Stored store(Wide value) { return value; }
};

struct Float16 {
  using Stored = uint16_t;
  using Wide = float;
  static Wide load(Stored value) { return float_from_float16(value); }
  static Stored store(Wide value) { return float16_from_float(value); }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Wide = float;
  static Wide load(Stored value) { return float_from_bfloat16(value); }
  static Stored store(Wide value) { return bfloat16_from_float(value); }
};

struct Sum {
  template <class T>
  static T apply(T so_far, T next) {
    return so_far + next;
  }
};

struct Max {
  template <class T>
  static T apply(T so_far, T next) {
    const bool keep = so_far >= next || so_far != so_far;
    return keep ? so_far : next;
  }
};

// memcpy is how an element is read at any alignment; it costs nothing.
template <class Format>
typename Format::Wide load_at(const std::byte* data, int64_t index) {
  typename Format::Stored value;
  std::memcpy(
      &value,
      data + index * static_cast<int64_t>(sizeof(value)),
      sizeof(value));
  return Format::load(value);
}

// `numel` is a constant for all blocks but the last, since compilers at -O2
// vectorise only loops of a known length.
template <class Format, class Op>
inline __attribute__((always_inline)) void reduce_block(
    std::span<const std::byte* const> contributions,
    int64_t first,
    int64_t numel,
    std::byte* output) {
  using Stored = typename Format::Stored;
  constexpr auto kSize = static_cast<int64_t>(sizeof(Stored));
  alignas(64) typename Format::Wide sums[kBlockNumel];
  alignas(64) Stored results[kBlockNumel];
  const std::byte* data = contributions[0] + first * kSize;
  for (int64_t i = 0; i < numel; ++i) {
    sums[i] = load_at<Format>(data, i);
  }
  for (size_t c = 1; c < contributions.size(); ++c) {
    data = contributions[c] + first * kSize;
    for (int64_t i = 0; i < numel; ++i) {
      sums[i] = Op::apply(sums[i], load_at<Format>(data, i));
    }
  }
  for (int64_t i = 0; i < numel; ++i) {
    results[i] = Format::store(sums[i]);
  }
  std::memcpy(
      output + first * kSize, results, static_cast<size_t>(numel * kSize));
}

template <class Format, class Op>
void reduce_all(
    std::span<const std::byte* const> contributions,
    std::byte* output,
    int64_t numel) {
  int64_t first = 0;
  for (; first + kBlockNumel <= numel; first += kBlockNumel) {
    reduce_block<Format, Op>(contributions, first, kBlockNumel, output);
  }
  if (first < numel) {
    reduce_block<Format, Op>(contributions, first, numel - first, output);
  }
}

template <class Format, class SumFormat = Format>
void reduce_as(
    ReduceOp op,
    std::span<const std::byte* const> contributions,
    std::byte* output,
    int64_t numel) {
  if (op == ReduceOp::kSum) {
    reduce_all<SumFormat, Sum>(contributions, output, numel);
  } else {
    reduce_all<Format, Max>(contributions, output, numel);
  }
}

} // namespace

void reduce(
    ReduceOp op,
    DType dtype,
    std::span<const std::byte* const> contributions,
    std::byte* output,
    int64_t numel) {
  if (contributions.empty()) {
    throw std::invalid_argument("reduce: expected at least one contribution");
  }
  if (numel == 0) {
    return;
  }
  if (contributions.size() == 1) {
    std::memmove(
        output, contributions[0], static_cast<size_t>(numel * size_of(dtype)));
    return;
  }
  switch (dtype) {
    case DType::kFloat32:
      return reduce_as<Native<float>>(op, contributions, output, numel);
    case DType::kFloat64:
      return reduce_as<Native<double>>(op, contributions, output, numel);
    case DType::kFloat16:
      return reduce_as<Float16>(op, contributions, output, numel);
    case DType::kBFloat16:
      return reduce_as<BFloat16>(op, contributions, output, numel);
    // Unsigned sums have the bits of signed ones, but may overflow.
    case DType::kInt32:
      return reduce_as<Native<int32_t>, Native<uint32_t>>(
          op, contributions, output, numel);
    case DType::kInt64:
      return reduce_as<Native<int64_t>, Native<uint64_t>>(
          op, contributions, output, numel);
  }
}

} // namespace fsdp::detail
