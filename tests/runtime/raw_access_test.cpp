// Memory of weights that is read without an operator: a clear error, or
// fsdp::touch().

#include "harness/chain.h"

#include <ATen/native/TensorIterator.h>
#include <ATen/ops/dot_native.h>

#include <sstream>

namespace fsdp::testing {
namespace {

using at::Tensor;

ParitySettings one_slot() {
  auto settings = split_strategies();
  settings.options.slots(1);
  return settings;
}

/// What a read without an operator says of a weight of layer 1.
const std::vector<std::string> kError = {
    "weight of unit 'layer1'",
    "while it is not whole",
    "without an operator",
    "fsdp::touch(weight)"};

/// Runs `test` in regions of nets whose layer 1 has been let go.
void each_released(
    const std::function<void(Chain&, ShardedTensors&)>& test,
    const ParitySettings& settings = one_slot()) {
  expect_undisturbed(
      [&](Chain& chain, ShardedTensors& net) {
        net.call([&] {
          const torch::NoGradGuard no_grad;
          chain.weight(1).sum();
          chain.weight(2).sum();
          test(chain, net);
        });
      },
      settings);
}

TEST(RawAccess, PointersOfAReleasedWeightAreRefused) {
  auto settings = one_slot();
  settings.strategies = {Strategy::kFullShard};
  each_released(
      [](Chain& chain, ShardedTensors&) {
        for (const auto& each :
             {chain.weight(1), chain.bias(1), chain.weight(1).detach().t()}) {
          EXPECT_TRUE(fails_with([&] { each.data_ptr<float>(); }, kError));
          EXPECT_TRUE(fails_with([&] { each.data_ptr(); }, kError));
          EXPECT_TRUE(fails_with([&] { each.const_data_ptr(); }, kError));
          EXPECT_TRUE(fails_with([&] { each.mutable_data_ptr(); }, kError));
          EXPECT_TRUE(
              fails_with([&] { each.const_data_ptr<float>(); }, kError));
          EXPECT_TRUE(fails_with([&] { each.storage().data(); }, kError));
          EXPECT_TRUE(
              fails_with([&] { each.storage().mutable_data(); }, kError));
        }
        EXPECT_TRUE(
            fails_with([&] { chain.weight(1).accessor<float, 2>(); }, kError));
      },
      settings);
}

TEST(RawAccess, PointersWithoutAnyTouchAreRefused) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        net.call([&] {
          EXPECT_TRUE(
              fails_with([&] { chain.weight(1).data_ptr<float>(); }, kError));
        });
      },
      split_strategies());
}

TEST(RawAccess, ShapesAndTypesNeedNoWeights) {
  each_released([](Chain& chain, ShardedTensors& net) {
    const auto gathers = net.gathers();
    const auto& weight = chain.weight(1);
    EXPECT_EQ(weight.toString(), "CPUFloatType");
    EXPECT_EQ(weight.sizes(), at::IntArrayRef({15, 15}));
    EXPECT_EQ(weight.strides(), at::IntArrayRef({15, 1}));
    EXPECT_EQ(weight.nbytes(), 15U * 15U * 4U);
    EXPECT_GE(weight.storage().nbytes(), weight.nbytes());
    EXPECT_TRUE(weight.is_contiguous());
    EXPECT_EQ(weight.scalar_type(), at::kFloat);
    EXPECT_TRUE(weight.device().is_cpu());
    EXPECT_TRUE(weight.is_leaf());
    EXPECT_TRUE(weight.requires_grad());
    EXPECT_EQ(net.gathers(), gathers);
  });
}

/// The weight's elements, read through its pointer.
Tensor read_raw(const Tensor& weight) {
  return torch::from_blob(
             const_cast<float*>(weight.const_data_ptr<float>()), weight.sizes())
      .clone();
}

TEST(RawAccess, TouchMakesAWeightWholeAndKeepsIt) {
  each_released([](Chain& chain, ShardedTensors&) {
    const auto expected = chain.weight(1).detach().clone();
    chain.weight(2).sum();
    const auto touched = fsdp::touch(chain.weight(1));
    const auto* pointer = chain.weight(1).const_data_ptr<float>();
    EXPECT_TRUE(at::equal(read_raw(chain.weight(1)), expected));
    for (size_t i = 0; i < 4; ++i) { // other units come and go
      chain.weight(i).sum();
    }
    EXPECT_EQ(chain.weight(1).const_data_ptr<float>(), pointer);
    EXPECT_TRUE(at::equal(read_raw(chain.weight(1)), expected));
  });
}

TEST(RawAccess, TouchEndsWithWhatItReturned) {
  auto settings = one_slot();
  settings.strategies = {Strategy::kFullShard};
  each_released(
      [](Chain& chain, ShardedTensors&) {
        {
          const auto touched = fsdp::touch(chain.bias(1));
          const auto again = fsdp::touch(chain.weight(1));
          chain.weight(2).sum();
          EXPECT_NE(chain.weight(1).const_data_ptr(), nullptr);
        }
        chain.weight(2).sum();
        chain.weight(3).sum();
        EXPECT_TRUE(
            fails_with([&] { chain.weight(1).const_data_ptr(); }, kError));
      },
      settings);
}

TEST(RawAccess, TouchOfOtherTensorsDoesNothing) {
  each_released([](Chain& chain, ShardedTensors& net) {
    const auto gathers = net.gathers();
    const auto touched = fsdp::touch(chain.x);
    const auto nothing = fsdp::touch(Tensor());
    EXPECT_EQ(net.gathers(), gathers);
  });
}

TEST(RawAccess, TouchOfAViewOutsideOfARegionIsRefused) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        const auto view = net.call([&] { return chain.weight(1).t(); });
        EXPECT_TRUE(fails_with(
            [&] { fsdp::touch(view); },
            {"outside of a region", "net.region()", "'layer1.weight'"}));
      },
      split_strategies());
}

TEST(RawAccess, PointerOfAViewOutsideOfARegionIsRefused) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        const auto view = net.call([&] { return chain.weight(1).t(); });
        net.unshard(); // not even by chance
        net.reshard();
        EXPECT_TRUE(fails_with([&] { view.data_ptr<float>(); }, kError));
      },
      [] {
        ParitySettings settings;
        settings.strategies = {Strategy::kFullShard};
        return settings;
      }());
}

/// Calls `kernel(a, b)` on released weights: an error; then with touches.
void expect_needs_touch(
    const std::function<Tensor(const Tensor&, const Tensor&)>& kernel) {
  auto settings = one_slot();
  settings.strategies = {Strategy::kFullShard};
  each_released(
      [&](Chain& chain, ShardedTensors&) {
        const auto a = chain.weight(1).detach();
        const auto b = chain.weight(3).detach();
        const auto expected = kernel(a.clone(), b.clone());
        chain.weight(2).sum(); // lets both go
        EXPECT_TRUE(fails_with(
            [&] { kernel(a, b); },
            {"weight of unit 'layer",
             "without an operator",
             "fsdp::touch(weight)"}));
        const auto touched_a = fsdp::touch(a);
        const auto touched_b = fsdp::touch(b);
        EXPECT_TRUE(at::equal(kernel(a, b), expected));
      },
      settings);
}

TEST(RawAccess, NativeKernelThatIsCalledDirectly) {
  expect_needs_touch([](const Tensor& a, const Tensor& b) {
    return at::native::dot(a.view({-1}), b.view({-1}));
  });
}

TEST(RawAccess, TensorIteratorOverWeights) {
  expect_needs_touch([](const Tensor& a, const Tensor& b) {
    auto out = torch::empty({15, 15});
    auto iterator = at::TensorIterator::borrowing_binary_op(out, a, b);
    iterator.for_each(
        [](char** data, const int64_t* strides, int64_t columns, int64_t rows) {
          for (int64_t row = 0; row < rows; ++row) {
            for (int64_t column = 0; column < columns; ++column) {
              const auto at = [&](int operand) {
                return reinterpret_cast<float*>(
                    data[operand] + column * strides[operand] +
                    row * strides[3 + operand]);
              };
              *at(0) = *at(1) * *at(2);
            }
          }
        });
    return out;
  });
}

TEST(RawAccess, OperatorThatIsRedispatchedByHand) {
  expect_needs_touch([](const Tensor& a, const Tensor& b) {
    return at::_ops::mm::redispatch(
        c10::DispatchKeySet(c10::DispatchKey::CPU), a, b);
  });
}

TEST(RawAccess, PinsEndWhenAKernelThrows) {
  auto settings = one_slot();
  settings.strategies = {Strategy::kFullShard};
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        net.call([&] {
          for (size_t i = 0; i < 3; ++i) {
            EXPECT_NE(
                error_of([&] { chain.x.mm(chain.weight(i).narrow(0, 0, 3)); }),
                "");
          }
          auto z = chain.x.clone().requires_grad_();
          auto y = torch::tanh(chain.layers[1]->forward(z));
          y.register_hook([](const Tensor&) -> Tensor {
            throw std::runtime_error("a hook of the program");
          });
          EXPECT_TRUE(fails_with(
              [&] { y.sum().backward(); }, {"a hook of the program"}));
          const torch::NoGradGuard no_grad;
          chain.weight(3).sum();
          // Only the last unit is whole: nothing else is pinned.
          EXPECT_EQ(
              net.memory().gathered_bytes,
              net.world().size() == 1 || weights_are_shared()
                  ? 0
                  : net.describe().units[3].whole_bytes);
          net.reset_peak_memory();
          chain.forward(chain.x);
          EXPECT_LE(
              net.memory().peak_gathered_bytes,
              net.describe().units[0].whole_bytes);
        });
        for (auto& parameter : chain.parameters()) {
          parameter.mutable_grad().reset();
        }
      },
      settings);
}

} // namespace
} // namespace fsdp::testing
