#pragma once

#include "random/spec.h"

#include <torch/torch.h>

#include <memory>
#include <vector>

namespace fsdp::random_models {

/// Trains those of floating point; without a gradient a step leaves them alone.
/// Divisors have an eps of 1e-4, for gradients that are rounding noise.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    OptimizerKind kind,
    const std::vector<at::Tensor>& parameters);

void zero_gradients(torch::optim::Optimizer& optimizer, const Spec& spec);

} // namespace fsdp::random_models
