// Ranks as processes, one of which dies or stops.

#include "comm/thread_world.h"
#include "rank_processes.h"

#include <gtest/gtest.h>

#include <iostream>
#include <random>
#include <set>
#include <string>

namespace fsdp::detail {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

// Deaths are noticed within a tenth of a second, on a machine that is not busy.
constexpr auto kNoticedWithin = seconds(5);
constexpr int kSize = 3;

/// What lies between the only places of `before` and `after` in `text`; empty
/// where they are not there.
std::string between(
    const std::string& text,
    const std::string& before,
    const std::string& after) {
  const size_t start = text.find(before);
  const size_t end = text.find(after, start);
  return start == std::string::npos || end == std::string::npos
      ? std::string()
      : text.substr(start + before.size(), end - start - before.size());
}

/// Checks what ranks 0 and 2 say of the death of rank 1, and returns in which
/// call they have noticed it.
std::string expect_death_is_told(RankProcesses& ranks) {
  const auto start = Clock::now();
  const std::string died = ": the ranks were aborted: rank 1/3 (pid " +
      std::to_string(ranks[1].pid()) + ", dead) died; rank ";
  std::string call;
  for (const int rank : {0, 2}) {
    const std::string text = ranks[rank].answer(seconds(10));
    EXPECT_TRUE(text.starts_with("error ")) << text;
    EXPECT_TRUE(contains(text, died)) << text;
    call = between(text, "/3 noticed it in ", ". Look for its last lines.");
    EXPECT_NE(call, "") << text;
  }
  const auto took = Clock::now() - start;
  EXPECT_LT(took, kNoticedWithin);
  std::cout << "noticed within "
            << std::chrono::duration_cast<milliseconds>(took).count()
            << " ms in " << call << "\n";
  return call;
}

TEST(DeadPeer, IsNamedInEveryCall) {
  std::mt19937 random(1);
  for (int i = 0; i < 4; ++i) {
    RankProcesses ranks(kSize, {.what = "calls"});
    std::this_thread::sleep_for(milliseconds(random() % 30));
    ranks[1].kill(SIGKILL);
    const std::set<std::string> calls = {
        "all_gather of unit 'a'",
        "all_reduce of norm",
        "barrier of start",
        "exchange of names"};
    EXPECT_TRUE(calls.contains(expect_death_is_told(ranks)));
    for (const int rank : {0, 2}) {
      const std::string text = ranks[rank].answer();
      EXPECT_TRUE(contains(text, "later barrier of one more: rank ")) << text;
      EXPECT_TRUE(contains(text, "aborted: rank 1/3 (pid ")) << text;
    }
  }
}

TEST(DeadPeer, IsNamedWhereverItDiesInTraining) {
  std::mt19937 random(2);
  for (int i = 0; i < 4; ++i) {
    RankProcesses ranks(kSize, {.what = "training", .count = 1'000'000});
    std::this_thread::sleep_for(milliseconds(random() % 50));
    ranks[1].kill(SIGKILL);
    expect_death_is_told(ranks);
  }
}

TEST(DeadPeer, IsOneThatEndsWithoutAWord) {
  RankProcesses ranks(kSize, {.what = "exit"});
  EXPECT_EQ(expect_death_is_told(ranks), "barrier of end");
}

TEST(LeavingPeer, IsNoDeadOne) {
  RankProcesses ranks(kSize, {.what = "leave"});
  int waited_for_it = 0; // the other may wait for that rank first
  for (const int rank : {0, 2}) {
    const std::string text = ranks[rank].answer(seconds(10));
    EXPECT_TRUE(contains(text, "/3 waits for rank ")) << text;
    EXPECT_TRUE(contains(text, ", gone without this call. Look for")) << text;
    waited_for_it += contains(text, "waits for rank 1, gone") ? 1 : 0;
  }
  EXPECT_GE(waited_for_it, 1);
}

TEST(StoppedPeer, IsNamedWhenTheTimeIsOver) {
  RankProcesses ranks(kSize, {.what = "calls", .timeout = milliseconds(1000)});
  ranks[1].kill(SIGSTOP);
  const std::string pid = std::to_string(ranks[1].pid());
  for (const int rank : {0, 2}) {
    const std::string text = ranks[rank].answer(seconds(10));
    EXPECT_TRUE(contains(text, "timed out after 1000 ms; not arrived: rank"))
        << text;
    EXPECT_TRUE(contains(text, "1 (pid " + pid + ", stopped, last call here: "))
        << text;
  }
  ranks[1].kill(SIGCONT); // and is told what has become of the others
  const std::string text = ranks[1].answer();
  EXPECT_TRUE(contains(text, "the ranks were aborted: ")) << text;
  EXPECT_TRUE(contains(text, "timed out after 1000 ms")) << text;
}

TEST(RanksAsProcesses, CallAtRandom) {
  RankProcesses ranks(4, {.what = "random", .seed = 5, .count = 300});
  ranks.expect_done(seconds(60));
}

TEST(RanksAsProcesses, Train) {
  RankProcesses ranks(2, {.what = "training", .seed = 5, .count = 100});
  ranks.expect_done(seconds(60));
}

} // namespace
} // namespace fsdp::detail
