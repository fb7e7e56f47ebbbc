#include "comm/call.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace fsdp::detail {
namespace {

[[noreturn]] void
reject(CallKind kind, const std::string& what, const std::string& problem) {
  throw std::invalid_argument(title_of(kind, what) + ": " + problem);
}

void check_elements(
    CallKind kind,
    const std::string& what,
    int64_t bytes,
    DType dtype) {
  if (bytes % size_of(dtype) != 0) {
    reject(
        kind,
        what,
        "expected whole elements of " + std::string(name_of(dtype)) +
            ", but got " + std::to_string(bytes) + " bytes");
  }
}

void check_op(const Call& call) {
  const bool is_integer =
      call.dtype == DType::kInt32 || call.dtype == DType::kInt64;
  if (call.op == ReduceOp::kMean && is_integer) {
    reject(
        call.kind,
        call.what,
        "expected a floating point type for a mean, but got " +
            std::string(name_of(*call.dtype)));
  }
}

std::string cuts_text(const std::vector<int64_t>& cuts) {
  std::string text = "cuts [";
  for (size_t i = 0; i < cuts.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(cuts[i]);
  }
  return text + "]";
}

std::string short_text(const Call& call) {
  return title_of(call.kind, call.what) + " (" + std::to_string(call.bytes) +
      " bytes)";
}

std::string long_text(const Call& call) {
  std::string text = std::string(name_of(call.kind)) + " '" + call.what +
      "' (" + std::to_string(call.bytes) + " bytes";
  if (call.dtype) {
    text += ", " + std::string(name_of(*call.dtype));
  }
  if (call.op) {
    text += ", " + std::string(name_of(*call.op));
  }
  if (call.root) {
    text += ", root " + std::to_string(*call.root);
  }
  if (!call.cuts.empty()) {
    text += ", " + cuts_text(call.cuts);
  }
  return text + ")";
}

} // namespace

Call all_gather_call(int64_t buffer_bytes, int size, std::string what) {
  Call call{
      .kind = CallKind::kAllGather,
      .what = std::move(what),
      .bytes = buffer_bytes};
  if (buffer_bytes % size != 0) {
    reject(
        call.kind,
        call.what,
        "expected a buffer of " + std::to_string(size) +
            " equal slices, but got " + std::to_string(buffer_bytes) +
            " bytes");
  }
  return call;
}

Call reduce_scatter_call(
    int64_t input_bytes,
    DType dtype,
    std::span<const int64_t> cuts,
    int size,
    std::string what,
    ReduceOp op) {
  Call call{
      .kind = CallKind::kReduceScatter,
      .what = std::move(what),
      .bytes = input_bytes,
      .dtype = dtype,
      .op = op,
      .cuts = {cuts.begin(), cuts.end()}};
  check_elements(call.kind, call.what, input_bytes, dtype);
  check_op(call);
  const int64_t numel = input_bytes / size_of(dtype);
  if (cuts.size() != static_cast<size_t>(size) + 1 || cuts.front() != 0 ||
      cuts.back() != numel || !std::is_sorted(cuts.begin(), cuts.end())) {
    reject(
        call.kind,
        call.what,
        "expected " + std::to_string(size + 1) +
            " non-decreasing cuts from 0 to " + std::to_string(numel) +
            ", but got " + cuts_text(call.cuts));
  }
  return call;
}

void check_output(const Call& call, int rank, int64_t output_bytes) {
  const auto r = static_cast<size_t>(rank);
  const int64_t expected =
      (call.cuts[r + 1] - call.cuts[r]) * size_of(*call.dtype);
  if (output_bytes != expected) {
    reject(
        call.kind,
        call.what,
        "expected an output of " + std::to_string(expected) +
            " bytes, but got " + std::to_string(output_bytes));
  }
}

Call all_reduce_call(
    int64_t buffer_bytes,
    DType dtype,
    ReduceOp op,
    std::string what) {
  Call call{
      .kind = CallKind::kAllReduce,
      .what = std::move(what),
      .bytes = buffer_bytes,
      .dtype = dtype,
      .op = op};
  check_elements(call.kind, call.what, buffer_bytes, dtype);
  check_op(call);
  return call;
}

Call broadcast_call(
    int64_t buffer_bytes,
    int root,
    int size,
    std::string what) {
  Call call{
      .kind = CallKind::kBroadcast,
      .what = std::move(what),
      .bytes = buffer_bytes,
      .root = root};
  if (root < 0 || root >= size) {
    reject(
        call.kind,
        call.what,
        "expected a root from 0 to " + std::to_string(size - 1) + ", but got " +
            std::to_string(root));
  }
  return call;
}

std::span<const std::byte>
part_of(const Call& call, std::span<const std::byte> input, int rank) {
  const auto r = static_cast<size_t>(rank);
  const int64_t element = size_of(*call.dtype);
  return input.subspan(
      static_cast<size_t>(call.cuts[r] * element),
      static_cast<size_t>((call.cuts[r + 1] - call.cuts[r]) * element));
}

std::string_view name_of(CallKind kind) {
  switch (kind) {
    case CallKind::kAllGather:
      return "all_gather";
    case CallKind::kReduceScatter:
      return "reduce_scatter";
    case CallKind::kAllReduce:
      return "all_reduce";
    case CallKind::kBroadcast:
      return "broadcast";
    case CallKind::kBarrier:
      return "barrier";
    case CallKind::kExchange:
      return "exchange";
    case CallKind::kSplit:
      return "split";
  }
  return "unknown";
}

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
  }
  return "unknown";
}

std::string_view name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kMean:
      return "mean";
  }
  return "unknown";
}

std::string title_of(CallKind kind, const std::string& what) {
  const std::string name(name_of(kind));
  return what.starts_with(name) ? what : name + " of " + what;
}

std::string rank_text(int rank, int size) {
  return "rank " + std::to_string(rank) + "/" + std::to_string(size);
}

std::string difference_text(
    const Call& first,
    int first_rank,
    const Call& second,
    int second_rank,
    int size) {
  const bool alike = short_text(first) == short_text(second);
  const auto text = alike ? long_text : short_text;
  return rank_text(first_rank, size) + " calls " + text(first) + ", " +
      rank_text(second_rank, size) + " calls " + text(second);
}

} // namespace fsdp::detail
