#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace fsdp::detail {

class FlatGroup;

// What code that updates parameters outside of regions has to know of them.

/// The flat group whose slice `tensor` shows, as parameters at rest do; null
/// for an ordinary tensor, and for what a net that is gone has left.
FlatGroup* group_of_shard(const at::Tensor& tensor);

/// Whether `tensor` is a parameter that has its whole shape, since a region is
/// open.
bool is_whole_in_region(const at::Tensor& tensor);

/// Whether both are gradients in one buffer of one flat group, in which what
/// lies between gradients is zero.
bool share_gradient_buffer(const at::Tensor& a, const at::Tensor& b);

/// "parameter 'layers.0.weight' (rank 1/2)", or "a parameter of shape [3]" of
/// an ordinary one, for messages.
std::string parameter_text(const at::Tensor& parameter);

/// `numel` elements from the first of `tensor` on, in the order of memory, as
/// a tensor of one dimension (see tensor_on_storage_of). Complex numbers show
/// as pairs of real ones.
at::Tensor memory_from(const at::Tensor& tensor, int64_t numel);

/// Tells graphs that have read `parameter` that it was written to.
void bump_version(const at::Tensor& parameter);

} // namespace fsdp::detail
