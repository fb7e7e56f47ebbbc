// Operators that the program registers with the dispatcher itself.

#include "harness/chain.h"

#include <ATen/Dispatch.h>
#include <torch/library.h>

namespace fsdp::testing {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

/// y = x * w by rows, with raw pointers.
Tensor raw_scale(const Tensor& x, const Tensor& w) {
  const auto source = x.contiguous();
  auto result = at::empty_like(source);
  const auto* px = source.const_data_ptr<float>();
  const auto* pw = w.const_data_ptr<float>();
  auto* py = result.mutable_data_ptr<float>();
  for (int64_t i = 0; i < source.numel(); ++i) {
    py[i] = px[i] * pw[i % w.numel()];
  }
  return result;
}

/// An older style of kernel: asks for the deprecated type().
Tensor old_style(const Tensor& x, const Tensor& w) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  TORCH_CHECK(w.type().scalarType() == at::kFloat);
#pragma GCC diagnostic pop
  return raw_scale(x, w);
}

thread_local Chain* captured = nullptr;

Tensor with_captured(const Tensor& x) {
  auto y = x;
  for (auto& layer : captured->layers) {
    y = at::tanh(y.mm(layer->weight.t()));
  }
  return y;
}

Tensor with_argument_and_captured(const Tensor& x, const Tensor& w) {
  return with_captured(x.mm(w));
}

TORCH_LIBRARY(fsdp_custom_operators, library) {
  library.def("raw_scale(Tensor x, Tensor w) -> Tensor");
  library.impl("raw_scale", c10::DispatchKey::CPU, TORCH_FN(raw_scale));
  library.def("old_style(Tensor x, Tensor w) -> Tensor");
  library.impl("old_style", c10::DispatchKey::CPU, TORCH_FN(old_style));
  library.def("captured(Tensor x) -> Tensor", TORCH_FN(with_captured));
  library.def(
      "both(Tensor x, Tensor w) -> Tensor",
      TORCH_FN(with_argument_and_captured));
}

template <class... T>
Tensor call_custom(const char* name, const T&... arguments) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Tensor(const T&...)>()
      .call(arguments...);
}

struct RawScale : torch::autograd::Function<RawScale> {
  static Tensor
  forward(AutogradContext* context, const Tensor& x, const Tensor& w) {
    context->save_for_backward({x, w});
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_custom("fsdp_custom_operators::raw_scale", x, w);
  }
  static tensor_list backward(AutogradContext* context, tensor_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], (gradients[0] * saved[0]).sum(0)};
  }
};

TEST(CustomOperators, RawKernelFindsWholeWeights) {
  for (const int slots : {1, 2}) {
    ParitySettings settings;
    settings.options.slots(slots);
    expect_same_training(
        [] {
          const auto owner = std::make_shared<Chain>();
          const auto scale = torch::randn({15}).requires_grad_();
          auto units = owner->units();
          units.push_back({"scale", {{"scale", scale}}});
          return TestModel{
              units,
              [owner, scale](const Tensor& rows) {
                auto y = owner->x.index_select(0, rows);
                for (auto& layer : owner->layers) {
                  y = torch::tanh(RawScale::apply(layer->forward(y), scale));
                }
                return y.pow(2).mean();
              },
              owner};
        },
        settings);
  }
}

TEST(CustomOperators, CompositeReadsWeightsThatAreNoArguments) {
  for (const int slots : {1, 2}) {
    ParitySettings settings;
    settings.options.slots(slots);
    expect_same_training(
        [] {
          const auto owner = std::make_shared<Chain>();
          const auto w = torch::randn({15, 15}).requires_grad_();
          auto units = owner->units();
          units.push_back({"extra", {{"extra", w}}});
          return TestModel{
              units,
              [owner, w](const Tensor& rows) {
                captured = owner.get();
                const auto x = owner->x.index_select(0, rows);
                return (call_custom("fsdp_custom_operators::both", x, w) +
                        call_custom("fsdp_custom_operators::captured", x))
                    .pow(2)
                    .mean();
              },
              owner};
        },
        settings);
  }
}

TEST(CustomOperators, CompositeOutsideOfARegionIsRefused) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors&) {
        captured = &chain;
        EXPECT_TRUE(fails_with(
            [&] { call_custom("fsdp_custom_operators::captured", chain.x); },
            {"'layer0.weight'", "outside of a region"}));
        EXPECT_TRUE(fails_with(
            [&] {
              call_custom(
                  "fsdp_custom_operators::raw_scale", chain.x, chain.bias(1));
            },
            {"fsdp_custom_operators::raw_scale", "'layer1.bias'"}));
      },
      split_strategies());
}

TEST(CustomOperators, DeprecatedTypeOfAWeightIsAnErrorOfLibtorch) {
  // The key that weights carry has no entry in libtorch's old list of types.
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        net.call([&] {
          const torch::NoGradGuard no_grad;
          EXPECT_TRUE(fails_with(
              [&] {
                call_custom(
                    "fsdp_custom_operators::old_style", chain.x, chain.bias(1));
              },
              {"Unrecognized tensor type ID", "DeferredInit"}));
        });
      },
      split_strategies());
}

} // namespace
} // namespace fsdp::testing
