// TorchScript: forked tasks, frozen modules, traces with weights as constants,
// files.

#include "harness/chain.h"
#include "scripted_models.h"

#include <torch/csrc/jit/frontend/resolver.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/passes/freeze_module.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <sstream>

namespace fsdp::testing {
namespace {

using at::Tensor;

/// Knows `fork`, which libtorch's own resolver for C++ does not.
struct ForkResolver final : torch::jit::NativeResolver {
  std::shared_ptr<torch::jit::SugaredValue> resolveValue(
      const std::string& name,
      torch::jit::GraphFunction& function,
      const torch::jit::SourceRange& place) override {
    return name == "fork"
        ? torch::jit::SpecialFormValue::create(torch::jit::prim::fork)
        : NativeResolver::resolveValue(name, function, place);
  }
};

MakeModel forking_model(bool one_unit) {
  return [one_unit] {
    auto module = std::make_shared<torch::jit::Module>("Forking");
    NamedUnits units;
    for (const auto* name : {"a", "b", "c"}) {
      const auto weight = torch::randn({33, 33}).mul_(0.2).requires_grad_();
      module->register_parameter(name, weight, false);
      if (units.empty() || !one_unit) {
        units.push_back({name, {}});
      }
      units.back().second.emplace_back(name, weight);
    }
    const auto source = R"(
      def branch(self, x: Tensor, w: Tensor) -> Tensor:
          y = x
          for i in range(4):
              y = torch.tanh(torch.matmul(y, w))
          return y
      def forward(self, x: Tensor) -> Tensor:
          first = fork(self.branch, x, self.a)
          second = fork(self.branch, x, self.b)
          y = self.branch(x, self.c)
          return torch.wait(first) + torch.wait(second) + y
    )";
    module->define(source, std::make_shared<ForkResolver>());
    const auto x = torch::randn({kRows, 33});
    return TestModel{
        units,
        [=](const Tensor& rows) {
          return module->forward({x.index_select(0, rows)})
              .toTensor()
              .pow(2)
              .mean();
        },
        module};
  };
}

TEST(TorchScript, ForkedTasksReadWeightsInThreadsOfThePool) {
  ParitySettings settings;
  settings.steps = 10;
  settings.world_sizes = {1};
  settings.options.slots(1);
  expect_same_training(forking_model(false), settings);
}

TEST(TorchScript, ForkedTasksOfOneUnitTrainOnSeveralRanks) {
  // One unit: the order in which tasks read weights does not matter.
  ParitySettings settings;
  settings.steps = 10;
  settings.world_sizes = {3};
  settings.strategies = {Strategy::kFullShard};
  expect_same_training(forking_model(true), settings);
}

TEST(TorchScript, ModuleThatWasFrozenBeforeHoldsViewsOfTheWeights) {
  const auto model = build_scripted();
  model->module.eval();
  const auto expected = evaluate(model->module, model->words);
  auto frozen = torch::jit::freeze(model->module);
  EXPECT_EQ(frozen.named_parameters().size(), 0U);
  EXPECT_TRUE(fails_with(
      [&] { const ShardedTensors net(units_of(model->module)); },
      {"somebody else holds a view of parameter '"}));
  frozen = torch::jit::freeze(reread(model->module)); // of a copy
  model->module = reread(model->module);
  const ShardedTensors net(units_of(model->module));
  EXPECT_TRUE(at::allclose(evaluate(frozen, model->words), expected));
}

TEST(TorchScript, FrozenInARegionRunsInRegionsOnly) {
  const auto expected = [] {
    const auto model = build_scripted();
    return evaluate(model->module, model->words);
  }();
  for (const int world_size : {1, 2, 3}) {
    run_ranks(
        world_size,
        [&](const World& world) {
          const auto model = build_scripted();
          model->module.eval();
          ShardedTensors net(units_of(model->module), world);
          torch::jit::Module frozen("none");
          net.call([&] { frozen = torch::jit::freeze(model->module); });
          EXPECT_TRUE(all_close(
              net.call([&] { return evaluate(frozen, model->words); }),
              expected,
              1e-6,
              1e-8));
          EXPECT_TRUE(fails_with(
              [&] { evaluate(frozen, model->words); },
              {"outside of a region", "or a view of it"}));
          EXPECT_TRUE(all_close(
              net.call([&] { return evaluate(model->module, model->words); }),
              expected,
              1e-6,
              1e-8));
        },
        kWaitLimit);
  }
}

TEST(TorchScript, TraceOfWeightsAsConstantsRunsInRegions) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(
        world_size,
        [](const World& world) {
          const auto chain = build_chain();
          const auto forward = [&](Tensor y) {
            for (auto& layer : chain->layers) {
              y = torch::tanh(layer->forward(y));
            }
            return y;
          };
          for (auto& parameter : chain->parameters()) {
            parameter.set_requires_grad(false); // a constant records no graph
          }
          const auto expected = forward(chain->x);
          ShardedTensors net(chain->units(), world);
          const torch::NoGradGuard no_grad;
          std::shared_ptr<torch::jit::Graph> graph;
          net.call([&] {
            graph = torch::jit::tracer::trace(
                        {chain->x},
                        [&](torch::jit::Stack in) -> torch::jit::Stack {
                          return {forward(in[0].toTensor())};
                        },
                        [](const Tensor&) { return std::string(); })
                        .first->graph;
          });
          torch::jit::GraphExecutor executor(graph, "traced");
          const auto run = [&] {
            torch::jit::Stack stack{chain->x};
            executor.run(stack);
            return stack.at(0).toTensor();
          };
          for (int i = 0; i < 3; ++i) {
            EXPECT_TRUE(all_close(net.call(run), expected, 1e-6, 1e-8)) << i;
          }
          EXPECT_TRUE(fails_with(
              run,
              {"'layer0.weight', or a view of it",
               "outside of a region",
               "net.region()"}));
        },
        kWaitLimit);
  }
}

TEST(TorchScript, FileThatIsWrittenInARegionIsAnError) {
  run_ranks(
      2,
      [](const World& world) {
        const auto model = build_scripted();
        const auto expected = evaluate(model->module, model->words);
        ShardedTensors net(units_of(model->module), world);
        EXPECT_TRUE(fails_with(
            [&] {
              net.call([&] {
                std::ostringstream stream;
                model->module.save(stream);
              });
            },
            {"weight of unit '", "while it is not whole"}));
        std::stringstream stream;
        {
          const auto whole = net.whole_parameters();
          model->module.save(stream);
        }
        const auto plain = torch::jit::load(stream);
        EXPECT_TRUE(
            all_close(evaluate(plain, model->words), expected, 1e-6, 1e-8));
      },
      kWaitLimit);
}

} // namespace
} // namespace fsdp::testing
