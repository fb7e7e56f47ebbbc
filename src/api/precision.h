#pragma once

#include <fsdp/units.h>

#include <torch/nn/module.h>

#include <unordered_set>
#include <utility>
#include <vector>

namespace fsdp::detail {

/// The modules that the rules match, and all below them. Throws c10::ValueError
/// for a rule that matches none.
std::unordered_set<const torch::nn::Module*> modules_of(
    const torch::nn::Module& root,
    const UnitPolicy& policy);

/// Buffers and the types that they are to have.
using BufferCasts = std::vector<std::pair<at::Tensor, at::ScalarType>>;

/// Adds the floating point buffers of `module` itself.
void add_buffer_casts(
    BufferCasts& casts,
    const torch::nn::Module& module,
    at::ScalarType dtype);

/// The tensors keep their identity.
void cast_buffers(const BufferCasts& casts);

} // namespace fsdp::detail
