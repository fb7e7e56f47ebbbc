#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>

namespace fsdp::detail {

/// The memory of a contiguous tensor, as communicators take it.
inline std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

} // namespace fsdp::detail
