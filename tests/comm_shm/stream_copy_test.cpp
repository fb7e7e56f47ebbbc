#include "comm/stream_copy.h"
#include "comm/sample_data.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

namespace fsdp::detail {
namespace {

constexpr size_t kLine = 64;
constexpr auto kGuard = std::byte{0xa5};

// Copies `bytes` from an address that is `from` past a cache line to one that
// is `to` past one. Nothing but the copy may change.
void expect_copied(size_t to, size_t from, size_t bytes, Stores stores) {
  const Bytes source = sample_bytes(static_cast<int64_t>(bytes + 2 * kLine), 1);
  Bytes target(bytes + 4 * kLine, kGuard);
  const auto past_line = [](const std::byte* data, size_t offset) {
    return (2 * kLine - reinterpret_cast<uintptr_t>(data) % kLine) % kLine +
        offset;
  };
  const size_t first = past_line(source.data(), from);
  const size_t begin = past_line(target.data(), to);
  copy_bytes(target.data() + begin, source.data() + first, bytes, stores);
  Bytes expected(target.size(), kGuard);
  std::copy_n(&source[first], bytes, &expected[begin]);
  ASSERT_EQ(target, expected) << bytes << " bytes, " << from << " to " << to;
}

TEST(StreamCopy, IsExactAtAllAlignments) {
  for (size_t to = 0; to < kLine; ++to) {
    for (size_t from = 0; from < kLine; ++from) {
      expect_copied(to, from, 3 * kLine + 7, Stores::kStream);
    }
  }
}

TEST(StreamCopy, IsExactForAllLengths) {
  for (const Stores stores : {Stores::kStream, Stores::kCached}) {
    for (size_t bytes = 0; bytes < 5 * kLine; ++bytes) {
      for (const size_t to : {0u, 1u, 16u, 63u}) {
        expect_copied(to, 3, bytes, stores);
      }
    }
    expect_copied(5, 9, (size_t{1} << 20) + 13, stores);
  }
}

TEST(StreamCopy, OfNothingNeedsNoAddresses) {
  copy_bytes(nullptr, nullptr, 0, Stores::kStream);
  copy_bytes(nullptr, nullptr, 0, Stores::kCached);
}

TEST(StreamCopy, IsForWhatDoesNotFitIntoTheCache) {
  EXPECT_EQ(stores_for(0), Stores::kCached);
  EXPECT_EQ(stores_for(size_t{64} << 10), Stores::kCached);
  EXPECT_EQ(stores_for(size_t{8} << 30), Stores::kStream);
}

} // namespace
} // namespace fsdp::detail
