#include "random/model.h"

namespace fsdp::random_models {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Compute = std::function<at::Tensor(const at::Tensor&)>;

struct ComputeHolder : torch::CustomClassHolder {
  explicit ComputeHolder(Compute f) : compute(std::move(f)) {}
  Compute compute;
};

/// Reentrant: backward runs a pass of its own, in which gradients arrive.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static at::Tensor forward(
      AutogradContext* context,
      const at::Tensor& x,
      const Compute& compute) {
    context->saved_data["compute"] =
        c10::IValue::make_capsule(c10::make_intrusive<ComputeHolder>(compute));
    context->save_for_backward({x});
    return compute(x);
  }

  static variable_list backward(
      AutogradContext* context,
      const variable_list& gradients) {
    const at::AutoGradMode with_gradients(true);
    const auto x =
        context->get_saved_variables()[0].detach().requires_grad_(true);
    const auto holder = context->saved_data["compute"].toCapsule();
    const auto y = static_cast<const ComputeHolder&>(*holder.get()).compute(x);
    torch::autograd::backward({y}, {gradients[0]});
    return {x.grad(), at::Tensor()};
  }
};

struct CustomLinear : torch::autograd::Function<CustomLinear> {
  static at::Tensor
  forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x.mm(w.t());
  }

  static variable_list backward(
      AutogradContext* context,
      const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].mm(saved[1]), gradients[0].t().mm(saved[0])};
  }
};

} // namespace

at::Tensor fit(const at::Tensor& x, int64_t columns) {
  if (x.size(1) == columns) {
    return x;
  }
  return x.index_select(1, torch::arange(columns).remainder(x.size(1)));
}

at::Tensor checkpoint(Compute f, const at::Tensor& x) {
  const auto input =
      x.requires_grad() ? x : x.detach().clone().requires_grad_(true);
  return Checkpoint::apply(input, std::move(f));
}

at::Tensor custom_linear(const at::Tensor& x, const at::Tensor& w) {
  return CustomLinear::apply(x.to(w.scalar_type()), w);
}

} // namespace fsdp::random_models
