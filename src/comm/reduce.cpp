#include "comm/reduce.h"

#include "comm/float16.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <type_traits>

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
  template <class T>
  static T finish(T sum, size_t /*count*/) {
    return sum;
  }
};

struct Mean : Sum {
  template <class T>
  static T finish(T sum, size_t count) {
    return sum / static_cast<T>(count);
  }
};

// Of a power of two; the same bits in a quarter of the time.
struct MeanByProduct : Sum {
  template <class T>
  static T finish(T sum, size_t count) {
    return sum * (T{1} / static_cast<T>(count));
  }
};

struct Max {
  template <class T>
  static T apply(T so_far, T next) {
    const bool keep = so_far >= next || so_far != so_far;
    return keep ? so_far : next;
  }
  template <class T>
  static T finish(T max, size_t /*count*/) {
    return max;
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
    std::byte* output,
    Stores stores) {
  using Stored = typename Format::Stored;
  using Wide = typename Format::Wide;
  constexpr auto kSize = static_cast<int64_t>(sizeof(Stored));
  const std::byte* data = contributions[0] + first * kSize;
  const std::byte* next = contributions[1] + first * kSize;
  alignas(64) Wide sums[kBlockNumel];
  for (int64_t i = 0; i < numel; ++i) {
    sums[i] = Op::apply(load_at<Format>(data, i), load_at<Format>(next, i));
  }
  for (size_t c = 2; c < contributions.size(); ++c) {
    data = contributions[c] + first * kSize;
    for (int64_t i = 0; i < numel; ++i) {
      sums[i] = Op::apply(sums[i], load_at<Format>(data, i));
    }
  }
  alignas(64) Stored results[kBlockNumel];
  for (int64_t i = 0; i < numel; ++i) {
    results[i] = Format::store(Op::finish(sums[i], contributions.size()));
  }
  copy_block(
      output + first * kSize,
      reinterpret_cast<const std::byte*>(results),
      static_cast<size_t>(numel * kSize),
      stores);
}

/// Of at least two contributions.
template <class Format, class Op>
void reduce_all(
    std::span<const std::byte* const> contributions,
    std::byte* output,
    int64_t numel,
    Stores stores) {
  int64_t first = 0;
  for (; first + kBlockNumel <= numel; first += kBlockNumel) {
    reduce_block<Format, Op>(contributions, first, kBlockNumel, output, stores);
  }
  if (first < numel) {
    reduce_block<Format, Op>(
        contributions, first, numel - first, output, stores);
  }
  finish_blocks(stores);
}

template <class Format>
void reduce_floats(
    ReduceOp op,
    std::span<const std::byte* const> contributions,
    std::byte* output,
    int64_t numel,
    Stores stores) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_all<Format, Sum>(contributions, output, numel, stores);
    case ReduceOp::kMean:
      return std::has_single_bit(contributions.size())
          ? reduce_all<Format, MeanByProduct>(
                contributions, output, numel, stores)
          : reduce_all<Format, Mean>(contributions, output, numel, stores);
    case ReduceOp::kMax:
      return reduce_all<Format, Max>(contributions, output, numel, stores);
  }
}

// Unsigned sums have the bits of signed ones, but may overflow.
template <class Integer>
void reduce_integers(
    ReduceOp op,
    std::span<const std::byte* const> contributions,
    std::byte* output,
    int64_t numel,
    Stores stores) {
  using Unsigned = std::make_unsigned_t<Integer>;
  switch (op) {
    case ReduceOp::kSum:
      return reduce_all<Native<Unsigned>, Sum>(
          contributions, output, numel, stores);
    case ReduceOp::kMax:
      return reduce_all<Native<Integer>, Max>(
          contributions, output, numel, stores);
    case ReduceOp::kMean:
      throw std::invalid_argument("reduce: integers have no mean");
  }
}

} // namespace

void reduce(
    ReduceOp op,
    DType dtype,
    std::span<const std::byte* const> contributions,
    std::byte* output,
    int64_t numel,
    Stores stores) {
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
      return reduce_floats<Native<float>>(
          op, contributions, output, numel, stores);
    case DType::kFloat64:
      return reduce_floats<Native<double>>(
          op, contributions, output, numel, stores);
    case DType::kFloat16:
      return reduce_floats<Float16>(op, contributions, output, numel, stores);
    case DType::kBFloat16:
      return reduce_floats<BFloat16>(op, contributions, output, numel, stores);
    case DType::kInt32:
      return reduce_integers<int32_t>(op, contributions, output, numel, stores);
    case DType::kInt64:
      return reduce_integers<int64_t>(op, contributions, output, numel, stores);
  }
}

} // namespace fsdp::detail
