#include "comm/call_codec.h"

#include <cstring>
#include <stdexcept>

namespace fsdp::detail {
namespace {

// Numbers in the order of memory: both sides are the same machine, or at least
// the same architecture.
constexpr int64_t kAbsent = -1;

void append(std::string& bytes, int64_t value) {
  const auto at = bytes.size();
  bytes.resize(at + sizeof(value));
  std::memcpy(bytes.data() + at, &value, sizeof(value));
}

int64_t take(std::string_view& bytes) {
  int64_t value = 0;
  if (bytes.size() < sizeof(value)) {
    throw std::invalid_argument("decode_call: the bytes end too early");
  }
  std::memcpy(&value, bytes.data(), sizeof(value));
  bytes.remove_prefix(sizeof(value));
  return value;
}

template <class Value>
int64_t number_of(const std::optional<Value>& value) {
  return value ? static_cast<int64_t>(*value) : kAbsent;
}

template <class Value>
std::optional<Value> optional_of(int64_t number) {
  return number == kAbsent ? std::optional<Value>()
                           : static_cast<Value>(number);
}

} // namespace

std::string encode_call(const Call& call) {
  std::string bytes;
  append(bytes, static_cast<int64_t>(call.kind));
  append(bytes, call.bytes);
  append(bytes, number_of(call.dtype));
  append(bytes, number_of(call.op));
  append(bytes, number_of(call.root));
  append(bytes, std::ssize(call.cuts));
  for (const int64_t cut : call.cuts) {
    append(bytes, cut);
  }
  return bytes + call.what;
}

Call decode_call(std::string_view bytes) {
  Call call;
  call.kind = static_cast<CallKind>(take(bytes));
  call.bytes = take(bytes);
  call.dtype = optional_of<DType>(take(bytes));
  call.op = optional_of<ReduceOp>(take(bytes));
  call.root = optional_of<int>(take(bytes));
  for (int64_t cuts = take(bytes); cuts > 0; --cuts) {
    call.cuts.push_back(take(bytes));
  }
  call.what = std::string(bytes);
  return call;
}

} // namespace fsdp::detail
