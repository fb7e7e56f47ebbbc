#include "ranks.h"

#include <span>

namespace row_encoder {

namespace {

double reduce(
    const fsdp::World& world,
    double value,
    fsdp::ReduceOp op,
    const std::string& what) {
  const auto bytes = std::as_writable_bytes(std::span(&value, 1));
  world.communicator()
      .all_reduce(bytes, fsdp::DType::kFloat64, op, what)
      ->wait();
  return value;
}

} // namespace

at::Tensor part_of(const at::Tensor& rows, const fsdp::World& world) {
  return rows.tensor_split(world.size())[world.rank()];
}

double sum_over_ranks(
    const fsdp::World& world,
    double value,
    const std::string& what) {
  return reduce(world, value, fsdp::ReduceOp::kSum, what);
}

double largest_over_ranks(
    const fsdp::World& world,
    double value,
    const std::string& what) {
  return reduce(world, value, fsdp::ReduceOp::kMax, what);
}

} // namespace row_encoder
