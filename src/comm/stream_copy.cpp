#include "comm/stream_copy.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace fsdp::detail {
namespace {

#if defined(__SSE2__)

constexpr size_t kLine = 64;

void copy_streaming(std::byte* to, const std::byte* from, size_t bytes) {
  const size_t misaligned = reinterpret_cast<uintptr_t>(to) % kLine;
  const size_t head = std::min(bytes, misaligned == 0 ? 0 : kLine - misaligned);
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    for (size_t i = 0; i < kLine; i += sizeof(__m128i)) {
      const __m128i value =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at + i));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at + i), value);
    }
  }
  std::memcpy(to + at, from + at, bytes - at);
}

// A release store does not order streaming stores.
void order_streaming_stores() {
  _mm_sfence();
}

#else

void copy_streaming(std::byte* to, const std::byte* from, size_t bytes) {
  std::memcpy(to, from, bytes);
}

void order_streaming_stores() {
}

#endif

size_t last_level_cache_bytes() {
  constexpr long kGuess = 32L << 20;
  const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return static_cast<size_t>(bytes > 0 ? bytes : kGuess);
}

} // namespace

void copy_bytes(
    std::byte* to,
    const std::byte* from,
    size_t bytes,
    Stores stores) {
  copy_block(to, from, bytes, stores);
  finish_blocks(stores);
}

void finish_blocks(Stores stores) {
  if (stores == Stores::kStream) {
    order_streaming_stores();
  }
}

void copy_block(
    std::byte* to,
    const std::byte* from,
    size_t bytes,
    Stores stores) {
  if (bytes == 0) {
    return;
  }
  if (stores == Stores::kStream) {
    copy_streaming(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

Stores stores_for(size_t bytes) {
  static const size_t cache = last_level_cache_bytes();
  return bytes > cache ? Stores::kStream : Stores::kCached;
}

} // namespace fsdp::detail
