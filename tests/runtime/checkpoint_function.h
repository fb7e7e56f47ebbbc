#pragma once

#include <torch/torch.h>

#include <functional>

namespace fsdp::testing {

/// Runs a function again in backward instead of keeping its activations.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  using Body = std::function<at::Tensor(const at::Tensor&)>;
  static at::Tensor forward(
      torch::autograd::AutogradContext* context,
      const at::Tensor& x,
      Body* body) {
    context->save_for_backward({x});
    context->saved_data["body"] = reinterpret_cast<int64_t>(body);
    const torch::NoGradGuard no_grad;
    return (*body)(x);
  }
  static torch::autograd::tensor_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::tensor_list gradients) {
    auto x = context->get_saved_variables()[0].detach().requires_grad_(true);
    auto* body = reinterpret_cast<Body*>(context->saved_data["body"].toInt());
    const torch::AutoGradMode grad(true);
    torch::autograd::backward({(*body)(x)}, {gradients[0]});
    return {x.grad(), at::Tensor()};
  }
};

} // namespace fsdp::testing
