#pragma once

#include "comm/c10d_backend.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fsdp::detail {

using C10dWorks = std::vector<c10::intrusive_ptr<c10d::Work>>;

/// The bytes of `memory` as a tensor that does not own them.
at::Tensor c10d_tensor_over(std::span<std::byte> memory);

/// A tensor of bytes of its own.
at::Tensor c10d_new_bytes(size_t bytes);

std::span<std::byte> c10d_bytes_of(const at::Tensor& tensor);

/// The few collectives of a c10d::Backend that everything is made of, on
/// tensors of bytes. Each adds what it starts to `works`, also when it throws,
/// and returns at once.
class C10dTransport {
 public:
  C10dTransport(
      C10dBackendPtr backend,
      int rank,
      int size,
      std::chrono::milliseconds timeout);

  int rank() const { return rank_; }

  int size() const { return size_; }

  c10d::Backend& backend() { return *backend_; }

  /// Null for back ends that are not our own.
  TaggedBackend* tagged() { return tagged_; }

  /// What follows belongs to a call with this hash.
  void enter(uint64_t hash) { hash_ = hash; }

  /// Gathers equal slices in place. The back end may copy.
  void gather(const at::Tensor& whole, C10dWorks& works);

  /// Gathers in place what lies between the cuts (in bytes), without a copy:
  /// one exchange with each peer.
  void gather_parts(
      const at::Tensor& whole,
      const std::vector<int64_t>& cuts,
      C10dWorks& works);

  /// Part r of `input`, as cut, goes to rank r; `output` receives as many equal
  /// parts as there are ranks.
  void scatter_parts(
      const at::Tensor& input,
      const std::vector<int64_t>& cuts,
      const at::Tensor& output,
      C10dWorks& works);

  void broadcast(const at::Tensor& tensor, int root, C10dWorks& works);

 private:
  c10::intrusive_ptr<c10d::Work> all_to_all(
      at::Tensor input,
      std::vector<int64_t> input_bytes,
      at::Tensor output,
      std::vector<int64_t> output_bytes);
  void tag_next();

  C10dBackendPtr backend_;
  TaggedBackend* tagged_; // the same object, or null
  int rank_;
  int size_;
  std::chrono::milliseconds timeout_; // of the back end's own waits
  uint64_t hash_ = 0;
  uint32_t count_ = 0;
};

} // namespace fsdp::detail
