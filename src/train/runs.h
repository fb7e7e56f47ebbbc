#pragma once

#include "train/updates.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace fsdp::detail {

/// Lists of tensors of one dtype, as libtorch's fused kernels take them: one
/// entry for each run.
///
/// [Note: Runs] The parameters of a flat group lie side by side in this rank's
/// slice, their gradients at the same distances in one buffer, and the state of
/// an optimizer is laid out likewise here. So neighbours at the same step are
/// one run for an element-wise kernel. The padding between them, which no
/// parameter owns, is zero in parameters, gradients and state and stays zero:
/// 0 / (0 + eps) is 0 where eps is not. What lies in a run is found anew in
/// each step, from addresses: gradients are, too.
struct Runs {
  std::vector<at::Tensor> parameters; // 1-D
  std::vector<at::Tensor> gradients;
  std::vector<std::vector<at::Tensor>> state; // by kind, then by run
  std::vector<int64_t> steps;
};

/// Whether a run may cover what lies between two parameters.
enum class Padding : uint8_t { kInRuns, kLeftAlone };

using UpdateKernel = std::function<void(Runs& runs)>;

/// Calls `kernel` with the runs of `updates`, which are distinct and in order,
/// once per dtype and device. Allocates, as zeros, state that is undefined.
void apply_updates(
    std::vector<Update>& updates,
    Padding padding,
    const UpdateKernel& kernel);

} // namespace fsdp::detail
