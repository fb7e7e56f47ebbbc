// Parameters of every shape and type, and what is made from them.

#include "harness/evaluation.h"
#include "harness/grouping.h"
#include "harness/mixed_precision.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace parameter_kinds {
namespace {

namespace nn = torch::nn;
namespace forward_ad = torch::autograd::forward_ad;
using at::Tensor;

TEST(ParameterKinds, WithoutDimensionsOrElementsAndBroadcast) {
  const auto make = [] {
    const auto scale = torch::tensor(0.5F).requires_grad_();
    const auto nothing = torch::empty({0, 4}).requires_grad_();
    const auto b = random_parameter({1, 1, 4});
    const auto w = random_parameter({3, 1});
    const auto x = torch::randn({2, 3, 4});
    return model_of(
        unit_per_tensor(
            {{"scale", scale}, {"nothing", nothing}, {"b", b}, {"w", w}}),
        [=](const Tensor&) {
          const auto input = cast_like(x, w);
          const auto y = input * scale * b + w;
          const auto joined = at::cat(
              {nothing.sum(0, true).expand({2, 4}),
               input.select(1, 0) * b.select(0, 0)});
          return y.pow(2).mean() + joined.pow(2).sum() * scale;
        });
  };
  expect_same_training_in_both_types(make, same_batch());
}

TEST(ParameterKinds, WithoutElementsInAUnitWithOthers) {
  const auto make = [] {
    const auto nothing = torch::empty({0}).requires_grad_();
    const auto w = random_parameter({70});
    return model_of(
        one_unit({{"nothing", nothing}, {"w", w}}), [=](const Tensor&) {
          return at::cat({nothing, w}).pow(2).sum();
        });
  };
  expect_same_training_in_both_types(make, same_batch());
}

TEST(ParameterKinds, Complex) {
  auto settings = same_batch();
  settings.optimizer = Optimizer::kSgd; // torch's AdamW squares complex numbers
  const auto make = [] {
    const auto w =
        (torch::randn({9, 9}, at::kComplexFloat) * 0.1).requires_grad_();
    const auto r = random_parameter({9});
    const auto x = torch::randn({kRows, 9}, at::kComplexFloat);
    return model_of(one_unit({{"w", w}, {"r", r}}), [=](const Tensor&) {
      const auto y = at::fft_fft(x.mm(w.conj())).mm(w.mH()) * r;
      return at::view_as_real(y).pow(2).mean() + at::real(w).sum() +
          at::imag(w.t()).pow(2).sum();
    });
  };
  expect_same_training_in_both_types(make, settings);
}

TEST(ParameterKinds, IntegersBooleansAndDoublesInOneUnit) {
  const auto make = [] {
    const auto w = random_parameter({9, 9});
    const auto index = torch::randint(0, 9, {70});
    const auto mask = torch::rand({9}) < 0.5;
    const auto factors = torch::randn({9}, at::kDouble);
    return model_of(
        one_unit(
            {{"w", w}, {"index", index}, {"mask", mask}, {"factors", factors}}),
        [=](const Tensor&) {
          return (w.index_select(0, index) * mask).pow(2).mean() +
              w.index({mask}).sum() + (cast_like(factors, w) * w).sum();
        });
  };
  expect_same_training_in_both_types(make, same_batch());
}

TEST(ParameterKinds, DoubleAndFloatFrozenAndTrainedInOneUnit) {
  expect_same_training([] {
    nn::Linear first(9, 11);
    nn::Linear second(11, 9);
    nn::Linear third(9, 9);
    second->to(at::kDouble);
    third->to(at::kDouble);
    second->weight.set_requires_grad(false);
    NamedTensors tensors;
    for (const auto& unit : unit_per_module(
             {{"first", first.ptr()},
              {"second", second.ptr()},
              {"third", third.ptr()}})) {
      tensors.insert(tensors.end(), unit.second.begin(), unit.second.end());
    }
    const auto x = torch::randn({kRows, 9});
    return model_of(one_unit(tensors), [=](const Tensor& rows) mutable {
      const auto y = torch::tanh(first(x.index_select(0, rows)));
      return third(torch::tanh(second(y.to(at::kDouble)))).pow(2).mean();
    });
  });
}

TEST(ParameterKinds, ThatWereNotContiguous) {
  expect_same_training_in_both_types([] {
    const auto w = torch::randn({9, 14}).t().detach().requires_grad_();
    const auto x = torch::randn({kRows, 9});
    return model_of(unit_per_tensor({{"w", w}}), [=](const Tensor& rows) {
      const auto weights = torch::arange(14).to(w.scalar_type());
      return (cast_like(x.index_select(0, rows), w).mm(w.t()) * weights)
          .pow(2)
          .mean();
    });
  });
}

TEST(ParameterKinds, ConvertedToSparse) {
  const auto make = [] {
    const auto a = random_parameter({9, 9});
    const auto b = random_parameter({9, 9});
    return model_of(unit_per_tensor({{"a", a}, {"b", b}}), [=](const Tensor&) {
      const auto product = at::_sparse_mm(b.detach().to_sparse(), a);
      return product.pow(2).sum() + b.sum();
    });
  };
  expect_same_training(make, same_batch());
}

TEST(ParameterKinds, ConvertedToQuantizedAndMkldnn) {
  expect_same_value([] {
    const auto a = random_parameter({9, 9});
    const auto b = random_parameter({9, 9});
    return model_of(unit_per_tensor({{"a", a}, {"b", b}}), [=](const Tensor&) {
      const auto quantized = at::quantize_per_tensor(a, 0.1, 0, at::kQInt8);
      return quantized.dequantize() + b.to_mkldnn().to_dense();
    });
  });
}

TEST(ParameterKinds, InForwardModeDerivatives) {
  const auto level = forward_ad::enter_dual_level(); // one for all ranks
  expect_same_value([level] {
    const auto a = random_parameter({9, 9});
    const auto b = random_parameter({9, 9});
    const auto tangent = torch::randn({9, 9});
    return model_of(unit_per_tensor({{"a", a}, {"b", b}}), [=](const Tensor&) {
      const auto dual = at::_make_dual(a.detach(), tangent, level);
      const auto y = dual.mm(b.detach()).tanh();
      const auto [primal, derivative] = at::_unpack_dual(y, level);
      EXPECT_TRUE(derivative.defined());
      return at::stack({primal, derivative});
    });
  });
  forward_ad::exit_dual_level(level);
}

/// Each rank has its own generator, in the same state.
TEST(ParameterKinds, ReadByOperatorsWithAGenerator) {
  const auto make = [] {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
    const auto w = random_parameter({9, 9});
    const auto v = random_parameter({9, 9});
    return model_of(unit_per_tensor({{"w", w}, {"v", v}}), [=](const Tensor&) {
      const auto noisy = at::normal(w.detach(), 0.1, generator);
      const auto mask = torch::empty({9, 9}).bernoulli_(0.5, generator);
      return (noisy * v).sum() + (w * mask * v).pow(2).sum();
    });
  };
  expect_same_training(make, same_batch());
}

TEST(ParameterKinds, WithDropoutOfTheSameRandomState) {
  auto settings = same_batch();
  settings.world_sizes = {1}; // the default generator is one for all threads
  const auto make = [] {
    nn::Linear first(16, 17);
    nn::Linear second(17, 16);
    const auto x = torch::randn({kRows, 16});
    return model_of(
        unit_per_parameter({{"first", first.ptr()}, {"second", second.ptr()}}),
        [=, seed = 0](const Tensor&) mutable {
          torch::manual_seed(++seed);
          const auto y = first(cast_like(x, first->weight));
          return second(at::dropout(y, 0.5, true)).pow(2).mean();
        });
  };
  expect_same_training_in_both_types(make, settings);
}

} // namespace
} // namespace parameter_kinds
} // namespace fsdp::testing
