#include "comm/c10d_records.h"

#include "comm/call_codec.h"

#include <algorithm>
#include <cstring>

namespace fsdp::detail {
namespace {

class RecordWriter {
 public:
  void add(uint64_t number) {
    char bytes[sizeof(number)];
    std::memcpy(bytes, &number, sizeof(number));
    bytes_.append(bytes, sizeof(number));
  }

  void add(std::string_view text) {
    add(uint64_t{text.size()});
    bytes_ += text;
  }

  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class RecordReader {
 public:
  explicit RecordReader(std::string_view bytes) : bytes_(bytes) {}

  uint64_t number() {
    uint64_t number = 0;
    std::memcpy(&number, next(sizeof(number)).data(), sizeof(number));
    return number;
  }

  std::string text() { return std::string(next(number())); }

 private:
  std::string_view next(uint64_t count) {
    if (count > bytes_.size()) {
      throw CommunicationError(
          "c10d: a record of another rank is cut off. Do all ranks run the "
          "same version of libfsdp?");
    }
    const auto part = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return part;
  }

  std::string_view bytes_;
};

} // namespace

std::string encode(const FailureRecord& record) {
  RecordWriter writer;
  writer.add(record.limit);
  writer.add(record.text);
  return writer.take();
}

FailureRecord decode_failure(std::string_view bytes) {
  RecordReader reader(bytes);
  FailureRecord record;
  record.limit = reader.number();
  record.text = reader.text();
  return record;
}

std::string encode(const WaitMark& mark) {
  RecordWriter writer;
  writer.add(mark.channel);
  writer.add(mark.epoch);
  writer.add(mark.calls);
  writer.add(mark.waits_for);
  writer.add(mark.open_calls.size());
  for (const auto& [number, call] : mark.open_calls) {
    writer.add(number);
    writer.add(encode_call(shortened(call)));
  }
  return writer.take();
}

WaitMark decode_mark(std::string_view bytes) {
  RecordReader reader(bytes);
  WaitMark mark;
  mark.channel = reader.text();
  mark.epoch = reader.number();
  mark.calls = reader.number();
  mark.waits_for = reader.number();
  for (uint64_t left = reader.number(); left > 0; --left) {
    const uint64_t number = reader.number();
    mark.open_calls.emplace_back(number, decode_call(reader.text()));
  }
  return mark;
}

Call shortened(Call call) {
  constexpr size_t kCuts = 48;
  constexpr size_t kWhat = 512;
  call.cuts.resize(std::min(call.cuts.size(), kCuts));
  call.what.resize(std::min(call.what.size(), kWhat));
  return call;
}

uint64_t hash_of(const Call& call) {
  uint64_t hash = 0xcbf29ce484222325u; // FNV-1a
  for (const char byte : encode_call(call)) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  }
  return hash;
}

std::string difference_of(
    const Call& call,
    int rank,
    const Call& other_call,
    int other_rank,
    int size) {
  const std::string text = rank > other_rank
      ? difference_text(call, rank, other_call, other_rank, size)
      : difference_text(other_call, other_rank, call, rank, size);
  return "ranks differ: " + text +
      ". All ranks must call the same collectives in the same order.";
}

} // namespace fsdp::detail
