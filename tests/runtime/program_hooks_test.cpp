// Hooks of the program on parameters: post-accumulate hooks run after the
// reduction, on the shard; tensor hooks see the whole gradient.

#include "checkpoint_function.h"
#include "harness/chain.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace fsdp::testing {
namespace {

using at::Tensor;
using torch::autograd::PostAccumulateGradHook;

/// Calls a function with the parameter.
class Hook final : public PostAccumulateGradHook {
 public:
  using Function = std::function<void(const Tensor&)>;
  explicit Hook(Function function) : function_(std::move(function)) {}
  void operator()(const Tensor& variable) override { function_(variable); }
  void compiled_args(
      torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}

 private:
  Function function_;
};

void set_hook(const Tensor& parameter, Hook::Function function) {
  torch::autograd::impl::set_post_acc_grad_hooks(
      parameter, std::make_unique<Hook>(std::move(function)));
}

/// SGD in a hook, as programs do to free gradients early.
void step_in_hook(const Tensor& parameter) {
  const torch::NoGradGuard no_grad;
  parameter.sub_(parameter.grad(), 0.1);
  parameter.mutable_grad().reset();
}

/// Trains chains whose every parameter takes its step in a hook, which is set
/// before step `when`; the optimizer finds no gradients.
ChainTraining stepping_in_hooks(int when) {
  ChainTraining training;
  training.before_step = [when](int step, Chain& chain, ShardedTensors*) {
    if (step == when) {
      for (const auto& parameter : chain.parameters()) {
        set_hook(parameter, step_in_hook);
      }
    }
  };
  return training;
}

TEST(ProgramHooks, SetBeforeShardingRunOnReducedShards) {
  expect_same_training(stepping_in_hooks(-1));
}

TEST(ProgramHooks, SetAfterShardingRunOnReducedShards) {
  expect_same_training(stepping_in_hooks(0));
  expect_same_training(stepping_in_hooks(2));
}

TEST(ProgramHooks, SetInTheForwardRegionRunOnReducedShards) {
  ChainTraining training;
  training.loss = [](Chain& chain, const Tensor& rows) {
    for (const auto& parameter : chain.parameters()) {
      set_hook(parameter, step_in_hook);
    }
    return chain.loss(rows);
  };
  expect_same_training(training);
}

TEST(ProgramHooks, SetInARegionThatRunsBackwardToo) {
  ChainTraining training;
  training.before_step = [](int step, Chain& chain, ShardedTensors* net) {
    if (step != 1) {
      return;
    }
    const auto rows =
        net == nullptr ? torch::arange(kRows) : rows_of_rank(net->world());
    std::optional<Region> region;
    if (net != nullptr) {
      region.emplace(net->region());
    }
    for (const auto& parameter : chain.parameters()) {
      set_hook(parameter, step_in_hook);
    }
    chain.loss(rows).backward();
    if (region) {
      region->close();
    }
  };
  expect_same_training(training);
}

TEST(ProgramHooks, SeeTheShapesOfShardsOutsideOfTheRegion) {
  for (const int world_size : {1, 2, 4}) {
    run_ranks(
        world_size,
        [](const World& world) {
          const auto chain = build_chain();
          ShardedTensors net(chain->units(), world);
          const auto local = net.describe().units[1].parameters[0].local_numel;
          Tensor seen;
          set_hook(chain->weight(1), [&](const Tensor& parameter) {
            EXPECT_TRUE(parameter.is_same(chain->weight(1)));
            EXPECT_EQ(parameter.sizes(), at::IntArrayRef({local}));
            EXPECT_EQ(parameter.grad().sizes(), parameter.sizes());
            seen = parameter.grad().clone();
          });
          net.call([&] { return chain->loss(rows_of_rank(world)); }).backward();
          ASSERT_TRUE(seen.defined());
          EXPECT_TRUE(at::equal(seen, chain->weight(1).grad()));
        },
        kWaitLimit);
  }
}

TEST(ProgramHooks, RunForGradientsOfThisPassOnly) {
  const auto count = [](const World* world) {
    const auto chain = build_chain();
    std::unique_ptr<ShardedTensors> net;
    if (world != nullptr) {
      net = std::make_unique<ShardedTensors>(chain->units(), *world);
    }
    std::vector<int> counts(4, 0);
    for (size_t i = 0; i < 4; ++i) {
      set_hook(chain->weight(i), [&counts, i](const Tensor&) { ++counts[i]; });
    }
    const auto call = [&](const std::function<Tensor()>& loss) {
      (net ? net->call(loss) : loss()).backward();
    };
    call([&] { return chain->loss(torch::arange(kRows)); });
    call([&] { return chain->layers[1]->forward(chain->x).sum(); });
    call([&] { return chain->layers[1]->forward(chain->x).sum(); });
    return counts;
  };
  const std::vector<int> expected = count(nullptr);
  EXPECT_EQ(expected, (std::vector<int>{1, 3, 1, 1}));
  for (const int world_size : {1, 2, 4}) {
    run_ranks(
        world_size,
        [&](const World& world) { EXPECT_EQ(count(&world), expected); },
        kWaitLimit);
  }
}

TEST(ProgramHooks, RunWhenLocalGradientsAreReduced) {
  run_ranks(
      2,
      [](const World& world) {
        const auto chain = build_chain();
        ShardedTensors net(chain->units(), world);
        int runs = 0;
        set_hook(chain->weight(1), [&](const Tensor&) { ++runs; });
        const auto backward = [&] {
          net.call([&] { return chain->loss(rows_of_rank(world)); }).backward();
        };
        {
          const auto local = net.no_sync();
          backward();
          EXPECT_EQ(runs, 0);
        }
        backward();
        EXPECT_EQ(runs, 1);
      },
      kWaitLimit);
}

TEST(ProgramHooks, ExceptionOfAHookLeavesTheNetUsable) {
  expect_undisturbed([](Chain& chain, ShardedTensors& net) {
    set_hook(chain.weight(1), [](const Tensor&) {
      throw std::runtime_error("a hook of the program");
    });
    const auto rows = rows_of_rank(net.world());
    EXPECT_TRUE(fails_with(
        [&] { net.call([&] { return chain.loss(rows); }).backward(); },
        {"a hook of the program"}));
    torch::autograd::impl::set_post_acc_grad_hooks(chain.weight(1), nullptr);
    for (auto& parameter : chain.parameters()) {
      parameter.mutable_grad().reset();
    }
  });
}

TEST(ProgramHooks, LayerOfTwoCheckpointsArrivesTwice) {
  expect_same_training([] {
    const auto owner = std::make_shared<Chain>();
    const auto body = std::make_shared<Checkpoint::Body>(
        [chain = owner.get()](const Tensor& y) {
          return torch::tanh(chain->layers[0]->forward(y));
        });
    return TestModel{
        owner->units(),
        [owner, body](const Tensor& rows) {
          auto y = owner->x.index_select(0, rows).requires_grad_();
          y = Checkpoint::apply(y, body.get());
          y = torch::tanh(owner->layers[1]->forward(y));
          y = Checkpoint::apply(y, body.get());
          y = torch::tanh(owner->layers[2]->forward(y));
          return (owner->layers[3]->forward(y)).pow(2).mean();
        },
        owner};
  });
}

TEST(ProgramHooks, NumberOfArrivalsMayChangeFromPassToPass) {
  ChainTraining training;
  training.settings.steps = 5;
  training.loss = [](Chain& chain, const Tensor& rows) {
    if (!chain.kept.defined()) {
      chain.kept = torch::zeros({}, at::kLong);
    }
    const auto times = 1 + chain.kept.add_(1).item<int64_t>() % 3;
    Checkpoint::Body body = [&chain](const Tensor& y) {
      return torch::tanh(chain.layers[0]->forward(y));
    };
    // The closure must live until backward: a pass inside of the forward call.
    auto y = chain.x.index_select(0, rows).requires_grad_();
    for (int i = 0; i < times; ++i) {
      y = Checkpoint::apply(y, &body);
    }
    (chain.layers[1]->forward(y)).pow(2).mean().backward();
    return chain.loss(rows);
  };
  expect_same_training(training);
}

} // namespace
} // namespace fsdp::testing
