#pragma once

#include "comm/c10d_operation.h"

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::detail {

/// Large receive buffers for reuse: fresh memory costs as much as the
/// reduction.
class C10dBuffers {
 public:
  at::Tensor take(size_t bytes);
  void give_back(at::Tensor buffer);

 private:
  std::vector<at::Tensor> free_; // the latest last
};

/// How the collectives are carried out on a C10dTransport. Sums are made here,
/// in rank order, so that every back end gives the same bits. Small calls run
/// on copies: those take no time, and may stay in flight when the caller has
/// gone.
class C10dPlanner {
 public:
  /// Works may use the caller's memory, which may go away after a failure,
  /// where what is in flight can be ended.
  C10dPlanner(int rank, int size, bool may_borrow);

  C10dPlan all_gather(Call call, std::span<std::byte> buffer);

  C10dPlan reduce_scatter(
      Call call,
      std::span<const std::byte> input,
      std::span<std::byte> output);

  C10dPlan all_reduce(Call call, std::span<std::byte> buffer);

  C10dPlan broadcast(Call call, std::span<std::byte> buffer);

  C10dPlan barrier(Call call);

  /// `texts` are filled by deliver().
  C10dPlan exchange(
      Call call,
      std::string_view mine,
      std::shared_ptr<std::vector<std::string>> texts);

  /// Adds a comparison of the call with those of the other ranks, under the
  /// name `shown`, before all else.
  void compare_first(C10dPlan& plan, const std::string& shown);

 private:
  bool borrows(size_t bytes) const;
  std::vector<int64_t> even_cuts(int64_t numel, int64_t element_bytes) const;
  C10dPlan token(Call call);
  C10dPlan all_reduce_by_gather(Call call, std::span<std::byte> buffer);

  int rank_;
  int size_;
  bool may_borrow_;
  std::shared_ptr<C10dBuffers> buffers_ = std::make_shared<C10dBuffers>();
};

} // namespace fsdp::detail
