#include "comm/c10d_records.h"
#include "comm/thread_world.h"

#include <gtest/gtest.h>

namespace fsdp::detail {
namespace {

Call scatter_call(int ranks) {
  Call call{
      .kind = CallKind::kReduceScatter,
      .what = "unit 'a'",
      .bytes = 128,
      .dtype = DType::kBFloat16,
      .op = ReduceOp::kSum};
  for (int64_t r = 0; r <= ranks; ++r) {
    call.cuts.push_back(r * 8);
  }
  return call;
}

TEST(C10dRecords, AreReadAsTheyWereWritten) {
  const auto failure =
      decode_failure(encode(FailureRecord{7, "out of memory"}));
  EXPECT_EQ(failure.limit, 7u);
  EXPECT_EQ(failure.text, "out of memory");
  const WaitMark mark{
      .channel = "root",
      .epoch = 3,
      .calls = 9,
      .waits_for = 8,
      .open_calls = {{8, scatter_call(4)}}};
  const auto read = decode_mark(encode(mark));
  EXPECT_EQ(read.channel, mark.channel);
  EXPECT_EQ(read.epoch, mark.epoch);
  EXPECT_EQ(read.calls, mark.calls);
  EXPECT_EQ(read.waits_for, mark.waits_for);
  EXPECT_EQ(read.open_calls, mark.open_calls);
}

TEST(C10dRecords, OfManyRanksAreCutOff) {
  Call call = scatter_call(10'000);
  call.what = std::string(5000, 'x');
  WaitMark mark;
  mark.open_calls = {{0, call}};
  const Call read = decode_mark(encode(mark)).open_calls[0].second;
  EXPECT_EQ(read, shortened(call));
  EXPECT_EQ(read.cuts.front(), 0);
  EXPECT_TRUE(call.what.starts_with(read.what));
}

TEST(C10dRecords, ThatAreCutOffBySomethingElseAreAnError) {
  const std::string bytes = encode(FailureRecord{7, "out of memory"});
  const auto text =
      error_of([&] { decode_failure(std::string_view(bytes).substr(0, 20)); });
  EXPECT_TRUE(contains(text, "cut off")) << text;
}

TEST(C10dRecords, HashEverythingThatMustBeTheSame) {
  const Call call = scatter_call(4);
  std::vector<Call> others(6, call);
  others[0].kind = CallKind::kAllReduce;
  others[1].what += "b";
  others[2].bytes = 64;
  others[3].dtype = DType::kFloat16;
  others[4].op = ReduceOp::kMax;
  others[5].cuts[1] = 9;
  EXPECT_EQ(hash_of(call), hash_of(scatter_call(4)));
  for (const Call& other : others) {
    EXPECT_NE(hash_of(other), hash_of(call));
  }
}

TEST(C10dRecords, TellADifferenceInTheSameWordsFromBothSides) {
  const Call gather{
      .kind = CallKind::kAllGather, .what = "unit 'a'", .bytes = 8};
  const Call scatter = scatter_call(2);
  const std::string text = difference_of(gather, 0, scatter, 1, 2);
  EXPECT_EQ(
      text,
      "ranks differ: rank 1/2 calls reduce_scatter of unit 'a' (128 bytes), "
      "rank 0/2 calls all_gather of unit 'a' (8 bytes). All ranks must call "
      "the "
      "same collectives in the same order.");
  EXPECT_EQ(difference_of(scatter, 1, gather, 0, 2), text);
}

} // namespace
} // namespace fsdp::detail
