#include <fsdp/optim.h>

#include "runtime/internal_guard.h"
#include "train/runs.h"
#include "train/updates.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace fsdp {

namespace {

using detail::Padding;
using detail::Runs;
using detail::Update;
using torch::optim::Optimizer;

using AdamKernel = void(
    at::TensorList parameters,
    at::TensorList gradients,
    at::TensorList exp_avgs,
    at::TensorList exp_avg_sqs,
    at::TensorList max_exp_avg_sqs,
    at::TensorList steps,
    double lr,
    double beta1,
    double beta2,
    double weight_decay,
    double eps,
    bool amsgrad,
    bool maximize,
    const std::optional<at::Tensor>& grad_scale,
    const std::optional<at::Tensor>& found_inf);

/// The kernels take the step as a tensor, one for each run.
std::vector<at::Tensor> step_tensors(const Runs& runs) {
  std::vector<at::Tensor> tensors;
  for (const auto i : c10::irange(runs.steps.size())) {
    const bool same = i > 0 && runs.steps[i] == runs.steps[i - 1];
    tensors.push_back(
        same ? tensors.back()
             : at::full(
                   {},
                   static_cast<double>(runs.steps[i]),
                   runs.parameters[i].options().dtype(at::kFloat)));
  }
  return tensors;
}

template <class O, class S>
struct AdamMethod {
  using Options = O;
  using State = S;
  const char* name;
  AdamKernel* kernel;

  static bool keeps_state(const Options& /*options*/) { return true; }

  template <class F>
  static void each_state(const Options& options, State& state, F&& visit) {
    visit("exp_avg", state.exp_avg());
    visit("exp_avg_sq", state.exp_avg_sq());
    if (options.amsgrad()) {
      visit("max_exp_avg_sq", state.max_exp_avg_sq());
    }
  }

  static int64_t count_step(State& state) {
    state.step(state.step() + 1);
    return state.step();
  }

  void update(const Options& options, std::vector<Update>& updates) const {
    // Without eps an element whose gradient was always 0 becomes NaN.
    const bool keeps_zero = options.eps() >= std::numeric_limits<float>::min();
    detail::apply_updates(
        updates,
        keeps_zero ? Padding::kInRuns : Padding::kLeftAlone,
        [&](Runs& runs) {
          const auto [beta1, beta2] = options.betas();
          runs.state.resize(3); // the third is empty without amsgrad
          kernel(
              runs.parameters,
              runs.gradients,
              runs.state[0],
              runs.state[1],
              runs.state[2],
              step_tensors(runs),
              options.lr(),
              beta1,
              beta2,
              options.weight_decay(),
              options.eps(),
              options.amsgrad(),
              /*maximize=*/false,
              /*grad_scale=*/std::nullopt,
              /*found_inf=*/std::nullopt);
        });
  }
};

enum class Momentum : uint8_t { kNone, kBegins, kGoesOn };

/// In 16 bits the fused kernel does not write the parameters (seen in 2.11 and
/// 2.13; 2.15 does).
void sgd_by_operators(
    const torch::optim::SGDOptions& options,
    Momentum momentum,
    const Runs& runs) {
  for (const auto i : c10::irange(runs.parameters.size())) {
    auto delta = runs.gradients[i];
    if (options.weight_decay() != 0.0) {
      delta = delta.add(runs.parameters[i], options.weight_decay());
    }
    if (momentum != Momentum::kNone) {
      const auto& buffer = runs.state[0][i];
      if (momentum == Momentum::kBegins) {
        buffer.copy_(delta);
      } else {
        buffer.mul_(options.momentum()).add_(delta, 1.0 - options.dampening());
      }
      delta =
          options.nesterov() ? delta.add(buffer, options.momentum()) : buffer;
    }
    runs.parameters[i].add_(delta, -options.lr());
  }
}

void sgd_kernel(
    const torch::optim::SGDOptions& options,
    Momentum momentum,
    const Runs& runs) {
  if (at::isReducedFloatingType(runs.parameters.front().scalar_type())) {
    sgd_by_operators(options, momentum, runs);
    return;
  }
  at::_fused_sgd_(
      runs.parameters,
      runs.gradients,
      momentum == Momentum::kNone ? at::TensorList() : runs.state[0],
      options.weight_decay(),
      options.momentum(),
      options.lr(),
      options.dampening(),
      options.nesterov(),
      /*maximize=*/false,
      /*is_first_step=*/momentum == Momentum::kBegins);
}

struct SgdMethod {
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;
  static constexpr const char* name = "SGD";

  static bool keeps_state(const Options& options) {
    return options.momentum() != 0.0;
  }

  template <class F>
  static void each_state(const Options& /*options*/, State& state, F&& visit) {
    visit("momentum_buffer", state.momentum_buffer());
  }

  static int64_t count_step(State& state) {
    return state.momentum_buffer().defined() ? 2 : 1; // first or later
  }

  void update(const Options& options, std::vector<Update>& updates) const {
    const auto apply = [&](std::vector<Update> some, Momentum momentum) {
      detail::apply_updates(some, Padding::kInRuns, [&](Runs& runs) {
        sgd_kernel(options, momentum, runs);
      });
    };
    if (!keeps_state(options)) {
      apply(std::move(updates), Momentum::kNone);
      return;
    }
    const auto later = std::stable_partition(
        updates.begin(), updates.end(), [](const Update& update) {
          return update.steps == 1;
        });
    apply({updates.begin(), later}, Momentum::kBegins);
    apply({later, updates.end()}, Momentum::kGoesOn);
  }
};

template <class State>
State& state_of(Optimizer& optimizer, const at::Tensor& parameter) {
  auto& state = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (state == nullptr) {
    state = std::make_unique<State>();
  }
  return static_cast<State&>(*state);
}

/// The updates of one param group, with their state. Nothing is changed but
/// that parameters without state get one that is empty.
template <class Method>
std::vector<Update> updates_with_state(
    Optimizer& optimizer,
    const Method& method,
    const torch::optim::OptimizerParamGroup& group) {
  using State = typename Method::State;
  const auto& options =
      static_cast<const typename Method::Options&>(group.options());
  auto updates = detail::updates_of(method.name, group);
  if (!Method::keeps_state(options)) {
    return updates;
  }
  for (auto& update : updates) {
    auto& state = state_of<State>(optimizer, update.parameter);
    Method::each_state(
        options, state, [&](const char* kind, at::Tensor& tensor) {
          detail::check_state(method.name, kind, tensor, update.parameter);
          update.state.push_back(&tensor);
        });
  }
  return updates;
}

template <class Method>
at::Tensor step(
    Optimizer& optimizer,
    const Optimizer::LossClosure& closure,
    const Method& method) {
  using State = typename Method::State;
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode grad(true);
    loss = closure();
  }
  const detail::InternalGuard internal;
  std::vector<std::vector<Update>> updates; // by param group
  for (const auto& group : optimizer.param_groups()) {
    updates.push_back(updates_with_state(optimizer, method, group));
  }
  detail::announce_writes(updates);
  for (const auto i : c10::irange(updates.size())) {
    const auto& options = static_cast<const typename Method::Options&>(
        optimizer.param_groups()[i].options());
    while (!updates[i].empty()) {
      auto distinct = detail::take_distinct(updates[i]);
      for (auto& update : distinct) {
        if (Method::keeps_state(options)) {
          update.steps =
              Method::count_step(state_of<State>(optimizer, update.parameter));
        }
      }
      method.update(options, distinct);
    }
  }
  return loss;
}

} // namespace

at::Tensor AdamW::step(LossClosure closure) {
  return fsdp::step(
      *this,
      closure,
      AdamMethod<torch::optim::AdamWOptions, torch::optim::AdamWParamState>{
          "AdamW", &at::_fused_adamw_});
}

at::Tensor Adam::step(LossClosure closure) {
  return fsdp::step(
      *this,
      closure,
      AdamMethod<torch::optim::AdamOptions, torch::optim::AdamParamState>{
          "Adam", &at::_fused_adam_});
}

at::Tensor SGD::step(LossClosure closure) {
  return fsdp::step(*this, closure, SgdMethod{});
}

} // namespace fsdp
