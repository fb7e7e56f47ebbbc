#include "comm/recording_communicator.h"

#include "comm/call.h"
#include "comm/completed_work.h"

#include <cstring>
#include <stdexcept>

namespace fsdp::detail {
namespace {

std::string line_of(const Call& call) {
  const std::string name(name_of(call.kind));
  std::string line =
      call.what.starts_with(name) ? call.what : name + " " + call.what;
  const bool has_bytes =
      call.kind != CallKind::kBarrier && call.kind != CallKind::kExchange;
  if (has_bytes) {
    line += " " + std::to_string(call.bytes) + " bytes";
  }
  if (call.dtype) {
    line += " " + std::string(name_of(*call.dtype));
  }
  if (call.op) {
    line += " " + std::string(name_of(*call.op));
  }
  if (call.root) {
    line += " root " + std::to_string(*call.root);
  }
  return line;
}

} // namespace

RecordingCommunicator::RecordingCommunicator(int rank, int size)
    : rank_(rank),
      size_(size),
      next_split_(rank, size),
      lines_(std::make_shared<std::vector<std::string>>()) {
  if (rank < 0 || rank >= size) {
    throw std::invalid_argument(
        "RecordingCommunicator: expected a rank below the size, but got " +
        rank_text(rank, size));
  }
}

std::unique_ptr<Work> RecordingCommunicator::all_gather(
    std::span<std::byte> buffer,
    std::string what) {
  record(line_of(all_gather_call(std::ssize(buffer), size_, std::move(what))));
  return std::make_unique<CompletedWork>();
}

std::unique_ptr<Work> RecordingCommunicator::reduce_scatter(
    std::span<const std::byte> input,
    std::span<std::byte> output,
    DType dtype,
    std::span<const int64_t> cuts,
    std::string what,
    ReduceOp op) {
  const Call call = reduce_scatter_call(
      std::ssize(input), dtype, cuts, size_, std::move(what), op);
  check_output(call, rank_, std::ssize(output));
  const auto part = part_of(call, input, rank_);
  if (!part.empty()) {
    std::memmove(output.data(), part.data(), part.size());
  }
  record(line_of(call));
  return std::make_unique<CompletedWork>();
}

std::unique_ptr<Work> RecordingCommunicator::all_reduce(
    std::span<std::byte> buffer,
    DType dtype,
    ReduceOp op,
    std::string what) {
  record(
      line_of(all_reduce_call(std::ssize(buffer), dtype, op, std::move(what))));
  return std::make_unique<CompletedWork>();
}

std::unique_ptr<Work> RecordingCommunicator::broadcast(
    std::span<std::byte> buffer,
    int root,
    std::string what) {
  record(line_of(
      broadcast_call(std::ssize(buffer), root, size_, std::move(what))));
  return std::make_unique<CompletedWork>();
}

void RecordingCommunicator::barrier(std::string what) {
  record(line_of({.kind = CallKind::kBarrier, .what = std::move(what)}));
}

std::vector<std::string> RecordingCommunicator::exchange(
    std::string_view mine,
    std::string what) {
  record(line_of({.kind = CallKind::kExchange, .what = std::move(what)}));
  return std::vector<std::string>(
      static_cast<size_t>(size_), std::string(mine));
}

void RecordingCommunicator::signal_failure(std::string_view message) {
  record("signal_failure " + std::string(message));
  epoch_->end_epoch();
}

void RecordingCommunicator::set_next_split(int rank, int size) {
  next_split_ = {rank, size};
}

std::shared_ptr<Communicator> RecordingCommunicator::split(int color, int key) {
  const std::string name = "color " + std::to_string(color);
  record("split " + name + " key " + std::to_string(key));
  auto child = std::make_shared<RecordingCommunicator>(
      next_split_.first, next_split_.second);
  child->epoch_ = std::make_shared<EpochCounter>(epoch_);
  child->lines_ = lines_;
  child->prefix_ = prefix_ + name + ": ";
  next_split_ = {rank_, size_};
  return child;
}

void RecordingCommunicator::record(const std::string& line) {
  lines_->push_back(prefix_ + line);
}

} // namespace fsdp::detail
