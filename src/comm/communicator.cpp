#include <fsdp/communicator.h>

#include "comm/pieces.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace fsdp {
namespace {

/// A call whose input was copied to one place.
class WorkOfCopy : public Work {
 public:
  WorkOfCopy(std::unique_ptr<std::byte[]> input, std::unique_ptr<Work> work)
      : input_(std::move(input)),
        work_(std::move(work)) {}

  bool ready() override { return work_->ready(); }
  void wait() override { work_->wait(); }

 private:
  std::unique_ptr<std::byte[]> input_; // outlives the call
  std::unique_ptr<Work> work_;
};

} // namespace

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
  }
  throw std::invalid_argument("size_of: not a DType");
}

std::unique_ptr<Work> Communicator::reduce_scatter_pieces(
    std::vector<Piece> input,
    std::span<std::byte> output,
    DType dtype,
    std::span<const int64_t> cuts,
    std::string what,
    ReduceOp op) {
  const int64_t total = cuts.empty() ? 0 : cuts.back() * size_of(dtype);
  detail::check_pieces(input, total, size_of(dtype), what);
  const auto bytes = static_cast<size_t>(std::max<int64_t>(total, 0));
  auto whole = std::make_unique_for_overwrite<std::byte[]>(bytes);
  detail::copy_pieces(whole.get(), input, 0, bytes);
  auto work = reduce_scatter(
      {whole.get(), bytes}, output, dtype, cuts, std::move(what), op);
  return std::make_unique<WorkOfCopy>(std::move(whole), std::move(work));
}

std::unique_ptr<Work> Communicator::all_reduce_pieces(
    std::vector<Piece> input,
    std::span<std::byte> output,
    DType dtype,
    ReduceOp op,
    std::string what) {
  detail::check_pieces(input, std::ssize(output), size_of(dtype), what);
  detail::visit_pieces(
      input,
      0,
      output.size(),
      [&](size_t offset, const std::byte* data, size_t piece_bytes) {
        std::byte* to = output.data() + offset;
        if (data == nullptr) {
          std::memset(to, 0, piece_bytes);
        } else if (data != to) {
          std::memcpy(to, data, piece_bytes);
        }
      });
  return all_reduce(output, dtype, op, std::move(what));
}

} // namespace fsdp
