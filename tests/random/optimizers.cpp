#include "random/optimizers.h"

#include <algorithm>
#include <iterator>

namespace fsdp::random_models {

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    OptimizerKind kind,
    const std::vector<at::Tensor>& parameters) {
  namespace optim = torch::optim;
  std::vector<at::Tensor> trained;
  std::copy_if(
      parameters.begin(),
      parameters.end(),
      std::back_inserter(trained),
      [](const at::Tensor& each) { return each.is_floating_point(); });
  switch (kind) {
    case OptimizerKind::kSgd:
      return std::make_unique<optim::SGD>(trained, optim::SGDOptions(0.02));
    case OptimizerKind::kMomentum:
      return std::make_unique<optim::SGD>(
          trained, optim::SGDOptions(0.02).momentum(0.9).weight_decay(0.01));
    case OptimizerKind::kAdamW:
      return std::make_unique<optim::AdamW>(
          trained, optim::AdamWOptions(0.01).eps(1e-4));
    case OptimizerKind::kAdagrad:
      return std::make_unique<optim::Adagrad>(
          trained, optim::AdagradOptions(0.01).eps(1e-4));
    case OptimizerKind::kRmsprop:
      return std::make_unique<optim::RMSprop>(
          trained, optim::RMSpropOptions(0.01).eps(1e-4).momentum(0.5));
  }
  return nullptr;
}

void zero_gradients(torch::optim::Optimizer& optimizer, const Spec& spec) {
  optimizer.zero_grad(/*set_to_none=*/!spec.keep_zeros);
}

} // namespace fsdp::random_models
