// TorchScript: forked tasks, frozen modules, traces with weights as constants,
// fused kernels, files.

#include "harness/chain.h"
#include "scripted_models.h"

#include <torch/csrc/jit/codegen/fuser/interface.h>
#include <torch/csrc/jit/frontend/resolver.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/passes/freeze_module.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/tensorexpr/kernel.h>

#include <sstream>

namespace fsdp::testing {
namespace {

using at::Tensor;

std::shared_ptr<Scripted> build_special(
    const std::function<void(Scripted&)>& change = [](Scripted&) {}) {
  const auto model = build([&] {
    TestModel result;
    const auto owner = std::make_shared<Scripted>();
    change(*owner);
    result.owner = owner;
    return result;
  });
  return std::static_pointer_cast<Scripted>(model.owner);
}

Tensor evaluate_special(const torch::jit::Module& module, const Tensor& words) {
  const torch::NoGradGuard no_grad;
  auto copy = module; // forward() is not const
  return copy.forward({words}).toTensor();
}

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
  settings.steps = 20;
  settings.world_sizes = {1};
  settings.options.slots(1);
  expect_same_training(forking_model(false), settings);
}

TEST(TorchScript, ForkedTasksOfOneUnitTrainOnSeveralRanks) {
  // One unit: the order in which tasks read weights does not matter.
  ParitySettings settings;
  settings.steps = 10;
  expect_same_training(forking_model(true), settings);
}

TEST(TorchScript, ModuleThatWasFrozenBeforeHoldsViewsOfTheWeights) {
  const auto model = build_special();
  model->module.eval();
  const auto expected = evaluate_special(model->module, model->words);
  auto frozen = torch::jit::freeze(model->module);
  EXPECT_EQ(frozen.named_parameters().size(), 0U);
  EXPECT_TRUE(fails_with(
      [&] { const ShardedTensors net(units_of(model->module)); },
      {"somebody else holds a view of parameter '"}));
  frozen = torch::jit::freeze(reread(model->module)); // of a copy
  model->module = reread(model->module);
  const ShardedTensors net(units_of(model->module));
  EXPECT_TRUE(at::allclose(evaluate_special(frozen, model->words), expected));
}

TEST(TorchScript, FreezingInARegionIsAnErrorOrWorksInRegions) {
  const auto expected = [] {
    const auto model = build_special();
    return evaluate_special(model->module, model->words);
  }();
  for (const int world_size : {1, 2, 3}) {
    run_as_threads(
        world_size,
        [&](const World& world) {
          const auto model = build_special();
          model->module.eval();
          ShardedTensors net(units_of(model->module), world);
          torch::jit::Module frozen("none");
          const auto error = error_of([&] {
            net.call([&] { frozen = torch::jit::freeze(model->module); });
          });
          if (error.empty()) {
            EXPECT_TRUE(all_close(
                net.call(
                    [&] { return evaluate_special(frozen, model->words); }),
                expected,
                1e-6,
                1e-8));
            EXPECT_TRUE(fails_with(
                [&] { evaluate_special(frozen, model->words); },
                {"outside of a region", "or a view of it"}));
          } else {
            EXPECT_NE(error.find("fsdp: "), std::string::npos) << error;
          }
          EXPECT_TRUE(all_close(
              net.call([&] {
                return evaluate_special(model->module, model->words);
              }),
              expected,
              1e-6,
              1e-8));
        },
        kWaitLimit);
  }
}

TEST(TorchScript, TraceOfWeightsAsConstantsRunsInRegions) {
  for (const int world_size : {1, 2, 3}) {
    run_as_threads(
        world_size,
        [](const World& world) {
          const auto chain = build_chain();
          const auto forward = [&](Tensor y) {
            for (auto& layer : chain->layers) { // constants record no graph
              y = torch::tanh(torch::linear(
                  y, layer->weight.detach(), layer->bias.detach()));
            }
            return y;
          };
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
  run_as_threads(
      2,
      [](const World& world) {
        const auto model = build_special();
        const auto expected = evaluate_special(model->module, model->words);
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
        EXPECT_TRUE(all_close(
            evaluate_special(plain, model->words), expected, 1e-6, 1e-8));
      },
      kWaitLimit);
}

/// Lets libtorch fuse pointwise operators on CPU, as it does on GPUs. The
/// kernels read memory without operators.
class ForcedFuser {
 public:
  explicit ForcedFuser(bool enabled)
      : must_use_llvm_(torch::jit::tensorexpr::getTEMustUseLLVMOnCPU()),
        could_fuse_(torch::jit::canFuseOnCPU()),
        was_enabled_(torch::jit::tensorExprFuserEnabled()) {
    torch::jit::tensorexpr::getTEMustUseLLVMOnCPU() = false;
    torch::jit::overrideCanFuseOnCPU(true);
    torch::jit::setTensorExprFuserEnabled(enabled);
  }
  ~ForcedFuser() {
    torch::jit::tensorexpr::getTEMustUseLLVMOnCPU() = must_use_llvm_;
    torch::jit::overrideCanFuseOnCPU(could_fuse_);
    torch::jit::setTensorExprFuserEnabled(was_enabled_);
  }
  ForcedFuser(const ForcedFuser&) = delete;
  ForcedFuser& operator=(const ForcedFuser&) = delete;

 private:
  bool must_use_llvm_;
  bool could_fuse_;
  bool was_enabled_;
};

bool last_graph_was_fused() {
  const auto text = torch::jit::lastExecutedOptimizedGraph()->toString();
  return text.find("TensorExpr") != std::string::npos;
}

/// Reads weights of two units in pointwise operators only: all in one kernel.
struct Pointwise {
  torch::jit::Module module{"Pointwise"};
  Tensor x = torch::randn({kRows, 65});

  Pointwise() {
    for (const auto* name : {"gain", "shift"}) {
      module.register_parameter(name, torch::randn({65}), false);
    }
    module.define(R"(
      def forward(self, x: Tensor) -> Tensor:
          y = torch.tanh(x * self.gain + self.shift)
          return torch.sigmoid(y) * y * self.gain + torch.tanh(y + self.shift)
    )");
  }
  NamedUnits units() const {
    return {
        {"gain", {{"gain", module.attr("gain").toTensor()}}},
        {"shift", {{"shift", module.attr("shift").toTensor()}}}};
  }
  Tensor run() { return evaluate_special(module, x); }
};

std::shared_ptr<Pointwise> build_pointwise() {
  const auto model = build([] {
    TestModel result;
    result.owner = std::make_shared<Pointwise>();
    return result;
  });
  return std::static_pointer_cast<Pointwise>(model.owner);
}

TEST(TorchScriptFuser, FusedKernelsOverWeightsAreAClearError) {
  const ForcedFuser forced(true);
  const auto plain = build_pointwise();
  const auto expected = plain->run();
  for (int i = 0; i < 4; ++i) {
    plain->run();
  }
  ASSERT_TRUE(last_graph_was_fused());
  for (const int world_size : {1, 2}) {
    run_as_threads(
        world_size,
        [&](const World& world) {
          const auto model = build_pointwise();
          ShardedTensors net(model->units(), world);
          // Right until a plan with fused kernels is made; then the kernel
          // finds no memory.
          std::string error;
          for (int i = 0; i < 6 && error.empty(); ++i) {
            error = error_of([&] {
              EXPECT_TRUE(all_close(
                  net.call([&] { return model->run(); }), expected, 1e-6, 1e-8))
                  << i;
            });
          }
          EXPECT_NE(error.find("without an operator"), std::string::npos)
              << error;
        },
        kWaitLimit);
  }
}

TEST(TorchScriptFuser, SwitchedOffComputesRight) {
  const ForcedFuser forced(false);
  const auto expected = build_pointwise()->run();
  for (const int world_size : {1, 2, 3}) {
    run_as_threads(
        world_size,
        [&](const World& world) {
          const auto model = build_pointwise();
          ShardedTensors net(model->units(), world, Options().slots(1));
          for (int i = 0; i < 5; ++i) {
            EXPECT_TRUE(all_close(
                net.call([&] { return model->run(); }), expected, 1e-6, 1e-8))
                << i;
          }
        },
        kWaitLimit);
  }
}

TEST(TorchScriptFuser, SwitchedOffTrains) {
  const ForcedFuser forced(false);
  ParitySettings settings;
  settings.world_sizes = {2};
  settings.strategies = {Strategy::kFullShard};
  expect_same_training(scripted_model(), settings);
}

TEST(TorchScriptFuser, PlansFromBeforeItWasSwitchedOffAreAClearErrorOrRight) {
  const auto expected = build_pointwise()->run();
  for (const int world_size : {1, 2}) {
    const ForcedFuser forced(true);
    run_as_threads(
        world_size,
        [&](const World& world) {
          const auto model = build_pointwise();
          for (int i = 0; i < 4; ++i) {
            model->run();
          }
          torch::jit::setTensorExprFuserEnabled(false);
          ShardedTensors net(model->units(), world);
          for (int i = 0; i < 4; ++i) {
            Tensor y;
            const auto error =
                error_of([&] { y = net.call([&] { return model->run(); }); });
            if (error.empty()) {
              EXPECT_TRUE(all_close(y, expected, 1e-6, 1e-8)) << i;
            } else {
              EXPECT_NE(error.find("without an operator"), std::string::npos)
                  << error;
            }
          }
        },
        kWaitLimit);
  }
}

} // namespace
} // namespace fsdp::testing
