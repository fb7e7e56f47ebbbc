#include "step/fused_adamw.h"

#include <utility>

namespace bench {

namespace {

// The defaults of torch::optim::AdamWOptions and of Python's AdamW.
constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.999;
constexpr double kEps = 1e-8;
constexpr double kWeightDecay = 0.01;

} // namespace

FusedAdamW::FusedAdamW(std::vector<at::Tensor> parameters, double learning_rate)
    : parameters_(std::move(parameters)),
      learning_rate_(learning_rate) {
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : parameters_) {
    averages_.push_back(torch::zeros_like(parameter));
    squares_.push_back(torch::zeros_like(parameter));
    steps_.push_back(torch::zeros({}));
  }
}

void FusedAdamW::step() {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  gradients.reserve(parameters_.size());
  for (const auto& parameter : parameters_) {
    gradients.push_back(parameter.grad());
  }
  at::_foreach_add_(steps_, 1);
  at::_fused_adamw_(
      parameters_,
      gradients,
      averages_,
      squares_,
      /*max_exp_avg_sqs=*/{},
      steps_,
      learning_rate_,
      kBeta1,
      kBeta2,
      kWeightDecay,
      kEps,
      /*amsgrad=*/false,
      /*maximize=*/false);
}

void FusedAdamW::zero_grad() {
  for (auto& parameter : parameters_) {
    parameter.mutable_grad().reset();
  }
}

} // namespace bench
