#pragma once

#include <fsdp/export.h>

#include <ATen/core/Tensor.h>

#include <memory>

namespace fsdp {

/// Keeps a weight whole while one lives.
class FSDP_API Touch {
 public:
  Touch(Touch&&) noexcept;
  Touch& operator=(Touch&&) noexcept;
  ~Touch();

 private:
  friend FSDP_API Touch touch(const at::Tensor& weight);
  struct State;
  explicit Touch(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// Makes `weight` whole inside a region, as an operator that reads it would:
/// for code that takes its data_ptr() itself. Keep the result while the pointer
/// is used. Does nothing for a tensor that is not a sharded parameter.
FSDP_API Touch touch(const at::Tensor& weight);

} // namespace fsdp
