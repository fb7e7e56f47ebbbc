#include "comm/one_thread.h"
#include "shm_world.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <thread>

namespace fsdp::detail {
namespace {

using std::chrono::milliseconds;

using Slices = std::shared_ptr<SharedSlices>;

const std::vector<int64_t> kSliceBytes = {100'000, 0, 1, 4096};

/// Whether the system may write to the byte at `address` for us.
bool is_writable(const std::byte* address) {
  std::array<int, 2> ends{};
  EXPECT_EQ(::pipe(ends.data()), 0);
  EXPECT_EQ(::write(ends[1], address, 1), 1);
  const auto read = ::read(ends[0], const_cast<std::byte*>(address), 1);
  EXPECT_TRUE(read == 1 || errno == EFAULT);
  ::close(ends[0]);
  ::close(ends[1]);
  return read == 1;
}

std::vector<Slices> share_all(const std::vector<Comm>& comms) {
  std::vector<Slices> all(comms.size());
  std::vector<std::thread> ranks;
  for (size_t r = 0; r < comms.size(); ++r) {
    ranks.emplace_back(
        [&, r] { all[r] = comms[r]->share_slices(kSliceBytes); });
  }
  for (std::thread& each : ranks) {
    each.join();
  }
  return all;
}

class SharedSlicesOfThree : public testing::Test {
 protected:
  std::vector<Comm> comms_ = make_ranks(3);
  std::vector<Slices> slices_ = share_all(comms_);
};

TEST_F(SharedSlicesOfThree, AreZerosAtFirst) {
  for (size_t buffer = 0; buffer < kSliceBytes.size(); ++buffer) {
    const auto whole = slices_[1]->whole(buffer);
    const auto bytes = static_cast<size_t>(kSliceBytes[buffer]);
    EXPECT_EQ(whole.size(), 3 * bytes);
    EXPECT_EQ(slices_[1]->own(buffer).size(), bytes);
    EXPECT_TRUE(std::all_of(whole.begin(), whole.end(), [](std::byte each) {
      return each == std::byte{0};
    }));
  }
}

TEST_F(SharedSlicesOfThree, ShowEveryRankWhatAllHaveWritten) {
  for (size_t buffer = 0; buffer < kSliceBytes.size(); ++buffer) {
    const int64_t bytes = kSliceBytes[buffer];
    const Bytes all = sample_bytes(3 * bytes, buffer);
    for (int64_t r = 0; r < 3; ++r) {
      std::copy_n(
          all.begin() + r * bytes,
          bytes,
          slices_[static_cast<size_t>(r)]->own(buffer).begin());
    }
    for (const Slices& each : slices_) {
      const auto whole = each->whole(buffer);
      EXPECT_TRUE(
          std::equal(whole.begin(), whole.end(), all.begin(), all.end()));
    }
  }
}

TEST_F(SharedSlicesOfThree, AreWholeInMemoryThatNobodyCanWriteTo) {
  EXPECT_FALSE(is_writable(slices_[0]->whole(0).data()));
  EXPECT_FALSE(is_writable(&slices_[0]->whole(3).back()));
  EXPECT_TRUE(is_writable(slices_[0]->own(0).data()));
}

TEST_F(SharedSlicesOfThree, OutliveTheCommunicators) {
  comms_.clear();
  slices_[2]->own(2)[0] = std::byte{9};
  EXPECT_EQ(slices_[0]->whole(2)[2], std::byte{9});
}

TEST_F(SharedSlicesOfThree, AreReadOnceAllHavePublishedAsOften) {
  for (const size_t r : {0u, 2u}) {
    slices_[r]->publish();
  }
  std::atomic<bool> is_published = false;
  std::thread last([&] {
    std::this_thread::sleep_for(milliseconds(150)); // the others sleep by then
    is_published = true;
    slices_[1]->publish();
  });
  slices_[0]->await_published("a");
  EXPECT_TRUE(is_published);
  last.join();
  slices_[1]->await_published("a");
}

TEST_F(SharedSlicesOfThree, AreWrittenOnceAllHaveRetiredAsOften) {
  for (const Slices& each : slices_) {
    each->retire();
  }
  slices_[0]->await_retired("a");
  slices_[0]->retire();
  slices_[2]->retire();
  std::atomic<bool> is_retired = false;
  std::thread last([&] {
    std::this_thread::sleep_for(milliseconds(150));
    is_retired = true;
    slices_[1]->retire();
  });
  slices_[0]->await_retired("b");
  EXPECT_TRUE(is_retired);
  last.join();
}

TEST_F(SharedSlicesOfThree, WaitForNobodyWhoIsAhead) {
  slices_[1]->publish();
  slices_[2]->publish();
  slices_[2]->publish();
  slices_[0]->await_published("nothing yet");
  slices_[0]->publish();
  slices_[0]->await_published("a");
}

TEST_F(SharedSlicesOfThree, AreNotWaitedForWhenAPeerFails) {
  slices_[0]->publish();
  std::thread peer([&] {
    std::this_thread::sleep_for(milliseconds(50));
    comms_[2]->signal_failure("out of memory");
  });
  EXPECT_EQ(
      error_of([&] { slices_[0]->await_published("a"); }),
      "rank 2/3 failed: out of memory");
  peer.join();
  EXPECT_EQ(barrier_error(*comms_[1]), "rank 2/3 failed: out of memory");
  expect_all_meet(comms_);
  for (const size_t r : {1u, 2u}) {
    slices_[r]->publish();
  }
  slices_[0]->await_published("a"); // the count went on
}

// It may be of the step after the one that this rank is in.
TEST_F(SharedSlicesOfThree, ThatAllHaveReachedHearOfNoFailure) {
  for (const Slices& each : slices_) {
    each->publish();
    each->retire();
  }
  comms_[2]->signal_failure("out of memory");
  slices_[0]->await_published("a");
  slices_[0]->await_retired("b");
  EXPECT_EQ(barrier_error(*comms_[0]), "rank 2/3 failed: out of memory");
}

TEST(SharedSlicesInTime, NameWhoDoesNotCome) {
  const auto comms = make_ranks(2, milliseconds(200));
  const auto slices = share_all(comms);
  slices[0]->publish();
  const std::string text =
      error_of([&] { slices[0]->await_published("all_gather of unit 'a'"); });
  EXPECT_TRUE(contains(
      text,
      "all_gather of unit 'a': rank 0/2 timed out after 200 ms; not arrived: "
      "rank 1 (thread of pid "))
      << text;
  EXPECT_TRUE(contains(text, "last call here: ")) << text;
  EXPECT_FALSE(comms[1]->aborted().empty());
}

} // namespace
} // namespace fsdp::detail
