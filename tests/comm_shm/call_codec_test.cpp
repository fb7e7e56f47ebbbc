#include "comm/call_codec.h"

#include "comm/thread_world.h"

#include <gtest/gtest.h>

#include <set>

namespace fsdp::detail {
namespace {

std::vector<Call> different_calls() {
  std::vector<Call> calls;
  for (const CallKind kind :
       {CallKind::kAllGather,
        CallKind::kReduceScatter,
        CallKind::kAllReduce,
        CallKind::kBroadcast,
        CallKind::kBarrier,
        CallKind::kExchange,
        CallKind::kSplit}) {
    calls.push_back({.kind = kind});
  }
  const Call call = {.kind = CallKind::kReduceScatter, .what = "unit 'a'"};
  const auto add = [&](auto&& change) {
    calls.push_back(call);
    change(calls.back());
  };
  add([](Call&) {});
  add([](Call& each) { each.what = "unit 'b'"; });
  add([](Call& each) { each.what += '\0'; });
  add([](Call& each) { each.bytes = 1; });
  add([](Call& each) { each.bytes = int64_t{1} << 40; });
  for (const DType dtype : {DType::kFloat32, DType::kInt64}) {
    add([&](Call& each) { each.dtype = dtype; });
  }
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
    add([&](Call& each) { each.op = op; });
  }
  for (const int root : {0, 7}) {
    add([&](Call& each) { each.root = root; });
  }
  for (const auto& cuts : std::vector<std::vector<int64_t>>{
           {0}, {0, 0}, {0, 5, 9}, {0, 5, int64_t{1} << 40}}) {
    add([&](Call& each) { each.cuts = cuts; });
  }
  return calls;
}

TEST(CallCodec, GivesTheCallBack) {
  for (const Call& call : different_calls()) {
    EXPECT_EQ(decode_call(encode_call(call)), call) << call.what;
  }
}

TEST(CallCodec, GivesDifferentCallsDifferentBytes) {
  const auto calls = different_calls();
  std::set<std::string> all;
  for (const Call& call : calls) {
    all.insert(encode_call(call));
  }
  EXPECT_EQ(all.size(), calls.size());
}

TEST(CallCodec, RefusesBytesThatEndEarly) {
  const Call call = {.kind = CallKind::kReduceScatter, .cuts = {0, 5, 9}};
  const std::string bytes = encode_call(call);
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_EQ(
        error_of<std::invalid_argument>(
            [&] { decode_call(bytes.substr(0, length)); }),
        "decode_call: the bytes end too early");
  }
}

} // namespace
} // namespace fsdp::detail
