#include "comm/shm_arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace fsdp::detail {
namespace {

constexpr size_t kMegabyte = size_t{1} << 20;

// Blocks are of calls of epoch 0; a call that is in free_ is read no more.
class Arena : public testing::Test {
 protected:
  std::optional<size_t> add(size_t bytes, uint64_t call) {
    return arena_.add(bytes, 0, call);
  }

  std::shared_ptr<ShmHost> host_ = std::make_shared<ShmHost>(
      ShmSegment::for_threads(1, 256 * kMegabyte)[0],
      std::chrono::seconds(1),
      0);
  std::set<uint64_t> free_;
  ShmArena arena_{host_, [this](uint64_t epoch, uint64_t call) {
                    EXPECT_EQ(epoch, 0u);
                    return free_.contains(call);
                  }};
};

TEST_F(Arena, HasRoomForTwoOfTheLargest) {
  const auto first = add(kMegabyte, 0);
  const auto second = add(kMegabyte, 1);
  ASSERT_TRUE(first && second);
  EXPECT_FALSE(add(kMegabyte, 2));
  free_ = {0};
  EXPECT_EQ(add(kMegabyte, 2), first);
  EXPECT_FALSE(add(1, 3));
  free_ = {0, 1, 2};
  EXPECT_TRUE(add(1, 3));
}

TEST_F(Arena, KeepsBlocksApart) {
  struct Range {
    size_t begin;
    size_t end;
  };
  std::mt19937_64 random(5);
  std::map<uint64_t, Range> live; // by call
  int added = 0;
  for (uint64_t call = 0; call < 20'000; ++call) {
    const size_t bytes = random() % (random() % 50 == 0 ? 100'000 : 3'000);
    if (const auto begin = add(bytes, call)) {
      EXPECT_EQ(*begin % 64, 0u);
      for (const auto& [other, range] : live) {
        ASSERT_TRUE(*begin + bytes <= range.begin || range.end <= *begin)
            << "calls " << call << " and " << other;
      }
      live[call] = {*begin, *begin + bytes};
      ++added;
    }
    while (live.size() > random() % 40) {
      auto done = live.begin();
      std::advance(done, random() % live.size());
      free_.insert(done->first);
      live.erase(done);
    }
  }
  EXPECT_GT(added, 15'000);
}

TEST_F(Arena, GivesSmallerMemoryBackWhenItHasGrown) {
  const auto small = add(kMegabyte, 0);
  const auto large = add(4 * kMegabyte, 1); // while the small one is read
  ASSERT_TRUE(small && large);
  EXPECT_FALSE(arena_.is_empty());
  free_ = {0};
  ASSERT_TRUE(add(1, 2));
  EXPECT_EQ(host_->allocate(2 * kMegabyte), small);
}

TEST_F(Arena, GivesEverythingBackAtTheEnd) {
  const auto begin = add(kMegabyte, 0);
  free_ = {0};
  EXPECT_TRUE(arena_.is_empty());
  arena_.close();
  EXPECT_EQ(host_->allocate(2 * kMegabyte), begin);
}

TEST_F(Arena, KeepsAtTheEndWhatIsStillRead) {
  const auto begin = add(kMegabyte, 0);
  ASSERT_TRUE(begin);
  *host_->at(*begin) = std::byte{7};
  arena_.close();
  EXPECT_NE(host_->allocate(2 * kMegabyte), begin);
  EXPECT_EQ(*host_->at(*begin), std::byte{7});
}

TEST_F(Arena, ReservesForTwo) {
  arena_.reserve(kMegabyte);
  const auto first = add(kMegabyte, 0);
  const auto second = add(kMegabyte, 1);
  ASSERT_TRUE(first && second); // in what was reserved:
  EXPECT_LT(
      std::max(*first, *second) - std::min(*first, *second), 2 * kMegabyte);
}

} // namespace
} // namespace fsdp::detail
