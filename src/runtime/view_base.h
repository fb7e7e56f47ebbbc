#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::detail {

/// Whether no other tensor shares the storage of `tensor`, apart from the base
/// that autograd keeps for a tensor that was made as a view and that nobody
/// else holds.
bool is_sole_user_of_storage(const at::Tensor& tensor);

} // namespace fsdp::detail
