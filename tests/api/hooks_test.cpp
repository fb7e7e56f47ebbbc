// Hooks of the program on parameters and activations.

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <functional>
#include <memory>

namespace fsdp::testing {
namespace hooks {

namespace nn = torch::nn;
using at::Tensor;

constexpr Strategy kStrategies[] = {
    Strategy::kFullShard,
    Strategy::kShardGradOp,
    Strategy::kShardOptimizer,
    Strategy::kNoShard};

void expect_doubled_gradients(ShardedModule& net, double head_factor) {
  const auto plain = seeded(make_network);
  plain->forward(wave({4, 3})).pow(2).mean().backward();
  for (const auto& [name, gradient] : whole_gradients(net)) {
    const double factor = name == "head.weight" ? head_factor : 1.0;
    EXPECT_TRUE(all_close(
        gradient, plain->named_parameters()[name].grad() * factor, 1e-6, 1e-8))
        << name;
  }
}

TEST(Hooks, OfAParameterSeeTheWholeGradientOncePerPass) {
  for (const auto strategy : kStrategies) {
    on_ranks(3, [&](const World& world) {
      const auto module = seeded(make_network);
      int calls = 0;
      module->head->weight.register_hook([&](const Tensor& gradient) {
        ++calls; // registered before sharding
        EXPECT_EQ(gradient.sizes(), at::IntArrayRef({2, 5}));
        return gradient * 2;
      });
      FullyShardedDataParallel net(
          module, world, Options().strategy(strategy).units(each<Block>()));
      net->head->weight.register_hook([&](const Tensor& gradient) {
        ++calls; // and after
        return gradient * 3;
      });
      for (int step = 1; step <= 2; ++step) {
        net(wave({4, 3})).pow(2).mean().backward();
        EXPECT_EQ(calls, 2 * step);
        expect_doubled_gradients(net, 6);
        net->zero_grad();
      }
    });
  }
}

TEST(Hooks, CanBeRemoved) {
  on_ranks(2, [](const World& world) {
    const auto module = seeded(make_network);
    const auto handle = module->head->weight.register_hook(
        [](const Tensor& gradient) { return gradient * 2; });
    FullyShardedDataParallel net(module, world);
    net(wave({4, 3})).pow(2).mean().backward();
    expect_doubled_gradients(net, 2);
    net->zero_grad();
    net->head->weight.remove_hook(handle);
    net(wave({4, 3})).pow(2).mean().backward();
    expect_doubled_gradients(net, 1);
  });
}

class AfterGradient final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit AfterGradient(std::function<void(const Tensor&)> call)
      : call_(std::move(call)) {}
  void operator()(const Tensor& variable) override { call_(variable); }

 private:
  std::function<void(const Tensor&)> call_;
};

TEST(Hooks, AfterAccumulationSeeTheReducedShard) {
  // An optimizer step in backward.
  for (const auto strategy : kStrategies) {
    on_ranks(3, [&](const World& world) {
      const auto module = seeded(make_network);
      int calls = 0;
      auto set_hooks = [&] {
        for (auto& parameter : module->parameters()) {
          torch::autograd::impl::set_post_acc_grad_hooks(
              parameter,
              std::make_unique<AfterGradient>([&](const Tensor& variable) {
                ++calls;
                const torch::NoGradGuard no_grad;
                const auto& gradient = variable.grad();
                ASSERT_TRUE(gradient.defined());
                EXPECT_EQ(gradient.sizes(), variable.sizes());
                Tensor shard = variable;
                shard.sub_(gradient, 0.1);
                shard.mutable_grad().reset();
              }));
        }
      };
      set_hooks();
      FullyShardedDataParallel net(
          module, world, Options().strategy(strategy).units(each<Block>()));
      const auto plain = seeded(make_network);
      torch::optim::SGD reference(plain->parameters(), 0.1);
      for (int step = 1; step <= 3; ++step) {
        if (step == 3) {
          set_hooks(); // after sharding: replaces the library's own
        }
        net(wave({4, 3})).pow(2).mean().backward();
        EXPECT_EQ(calls, 18 * step);
        reference.zero_grad();
        plain->forward(wave({4, 3})).pow(2).mean().backward();
        reference.step();
        for (const auto& [name, value] : whole_values(net)) {
          EXPECT_TRUE(
              all_close(value, plain->named_parameters()[name], 1e-6, 1e-8))
              << name;
        }
      }
    });
  }
}

TEST(Hooks, OfAnActivationMayReadWeights) {
  ProgramSettings settings;
  settings.options.units(each<Block>());
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        for (int step = 0; step < 2; ++step) {
          const auto y = net.call(
              &NetworkImpl::features, log.mine(wave({kRows, 3}, 0.7 + step)));
          y.register_hook([&](const Tensor& gradient) {
            return gradient * (1 + net->head->weight.detach().sum());
          });
          auto loss = net.call(
              [&](NetworkImpl& module) { return module.head(y).mean(); });
          loss.backward();
          log.loss(loss);
          log.gradients(net);
        }
      },
      settings);
}

TEST(Hooks, AHookThatThrowsEndsTheStepOnAllRanks) {
  std::vector<std::string> errors(3);
  on_ranks(3, [&](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_network), world, Options().units(each<Block>()));
    const auto handle =
        net->layers[0]->as<BlockImpl>()->up->weight.register_hook(
            [&](const Tensor& gradient) {
              TORCH_CHECK(world.rank() != 1, "the hook of rank 1 gave up");
              return gradient;
            });
    auto loss = net(wave({4, 3})).pow(2).mean();
    errors[static_cast<size_t>(world.rank())] =
        error_of([&] { loss.backward(); });
    for (const auto& parameter : net.parameters()) {
      EXPECT_FALSE(parameter.grad().defined());
    }
    net->layers[0]->as<BlockImpl>()->up->weight.remove_hook(handle);
    net(wave({4, 3})).pow(2).mean().backward();
    expect_doubled_gradients(net, 1);
  });
  share_results(errors);
  for (const auto& error : errors) {
    EXPECT_TRUE(contains(error, "the hook of rank 1 gave up")) << error;
  }
}

} // namespace hooks
} // namespace fsdp::testing
