#pragma once

#include <fsdp/communicator.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::detail {

enum class CallKind : uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kBarrier,
  kExchange,
  kSplit,
};

/// What a rank asks for in one collective call: all that must be the same on
/// all ranks.
struct Call {
  CallKind kind = CallKind::kBarrier;
  std::string what = {};
  int64_t bytes = 0; // of the whole buffer; 0 where the ranks' may differ
  std::optional<DType> dtype = {};
  std::optional<ReduceOp> op = {};
  std::optional<int> root = {};
  std::vector<int64_t> cuts = {};

  bool operator==(const Call&) const = default;
};

// Each checks the arguments that one rank can check alone, and throws
// std::invalid_argument that names `what`.

Call all_gather_call(int64_t buffer_bytes, int size, std::string what);

Call reduce_scatter_call(
    int64_t input_bytes,
    DType dtype,
    std::span<const int64_t> cuts,
    int size,
    std::string what,
    ReduceOp op = ReduceOp::kSum);

/// Checks the length of the output that goes with reduce_scatter_call.
void check_output(const Call& call, int rank, int64_t output_bytes);

Call all_reduce_call(
    int64_t buffer_bytes,
    DType dtype,
    ReduceOp op,
    std::string what);

Call broadcast_call(int64_t buffer_bytes, int root, int size, std::string what);

/// The part of a reduce_scatter's input that `rank` receives.
std::span<const std::byte>
part_of(const Call& call, std::span<const std::byte> input, int rank);

std::string_view name_of(CallKind kind);
std::string_view name_of(DType dtype);
std::string_view name_of(ReduceOp op);

/// `what`, with the name of the collective before it where it does not begin
/// with that: "all_gather of unit 'a'".
std::string title_of(CallKind kind, const std::string& what);

/// "rank 2/4".
std::string rank_text(int rank, int size);

/// Both calls, as "rank 1/4 calls A (128 bytes), rank 0/4 calls B (64 bytes)".
/// Names more than the bytes where the two would read the same.
std::string difference_text(
    const Call& first,
    int first_rank,
    const Call& second,
    int second_rank,
    int size);

} // namespace fsdp::detail
