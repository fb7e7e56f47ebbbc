// TorchScript modules are sharded through their named parameters.

#include "harness/chain.h"
#include "scripted_models.h"

#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

namespace fsdp::testing {
namespace {

using at::Tensor;

/// Few trainings: the executor makes its plans for each of them anew, which
/// takes most of the time. Five steps are enough for it to have made them.
ParitySettings few_trainings() {
  ParitySettings settings;
  settings.steps = 5;
  settings.world_sizes = {1, 3};
  settings.strategies = {Strategy::kFullShard};
  return settings;
}

void read_again(Scripted& model) {
  model.module = reread(model.module);
}

/// The same model as a trace of it.
void trace(Scripted& model) {
  const auto scripted = model.module;
  auto traced = torch::jit::Module("Traced");
  for (const auto* name : {"first", "second"}) {
    auto child = torch::jit::Module(name);
    for (const auto& parameter :
         scripted.attr(name).toModule().named_parameters(false)) {
      child.register_parameter(parameter.name, parameter.value, false);
    }
    traced.register_module(name, child);
  }
  for (const auto& parameter : scripted.named_parameters(false)) {
    traced.register_parameter(parameter.name, parameter.value, false);
  }
  const auto state = torch::jit::tracer::trace(
                         {model.words},
                         [&](torch::jit::Stack inputs) -> torch::jit::Stack {
                           return {scripted.get_method("forward")(inputs)};
                         },
                         [](const Tensor&) { return std::string(); },
                         /*strict=*/true,
                         /*force_outplace=*/false,
                         &traced)
                         .first;
  const auto name = c10::QualifiedName(*traced.type()->name(), "forward");
  traced.type()->addMethod(
      traced._ivalue()->compilation_unit()->create_function(
          name, state->graph));
  model.module = traced;
}

TEST(TorchScript, ScriptedModuleTrains) {
  auto settings = few_trainings();
  settings.world_sizes = {2};
  settings.strategies = kAllStrategies;
  expect_same_training(scripted_model(), settings);
}

TEST(TorchScript, ModuleThatWasLoadedTrains) {
  expect_same_training(scripted_model(read_again), few_trainings());
}

TEST(TorchScript, TracedModuleTrains) {
  expect_same_training(scripted_model(trace), few_trainings());
}

TEST(TorchScript, TracedModuleThatWasLoadedTrains) {
  expect_same_training(
      scripted_model([](Scripted& model) {
        trace(model);
        read_again(model);
      }),
      few_trainings());
}

/// Sets one of the executor's flags while it lives.
class Flag {
 public:
  Flag(std::atomic<bool>& flag, bool value)
      : flag_(flag),
        previous_(flag.exchange(value)) {}
  ~Flag() { flag_ = previous_; }
  Flag(const Flag&) = delete;
  Flag& operator=(const Flag&) = delete;

 private:
  std::atomic<bool>& flag_;
  bool previous_;
};

TEST(TorchScript, SimpleExecutorTrains) {
  const Flag executor(torch::jit::getExecutorMode(), false);
  expect_same_training(scripted_model(read_again));
}

TEST(TorchScript, ExecutorWithoutProfilesTrains) {
  const Flag profiling(torch::jit::getProfilingMode(), false);
  auto settings = few_trainings();
  settings.world_sizes = {1, 2, 4};
  expect_same_training(scripted_model(read_again), settings);
}

TEST(TorchScript, ComputesInBfloat16) {
  // No reference casts in the same places; the bound is that of 16 bits.
  const Flag executor(torch::jit::getExecutorMode(), false);
  ParitySettings settings;
  settings.options.mixed_precision(
      {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
  settings.world_sizes = {1, 3};
  settings.loss_tolerance = 5e-2;
  settings.parameter_tolerance = 5e-2;
  expect_same_training(scripted_model(read_again), settings);
  expect_same_training(scripted_model(trace), settings);
}

void expect_same_evaluation() {
  const auto expected = [] {
    const auto model = build_scripted();
    return evaluate(model->module, model->words);
  }();
  for (const int world_size : {1, 2, 3, 4}) {
    for (const auto strategy : kAllStrategies) {
      run_ranks(
          world_size,
          [&](const World& world) {
            const auto model = build_scripted(read_again);
            model->module.eval();
            ShardedTensors net(
                units_of(model->module), world, Options().strategy(strategy));
            for (int i = 0; i < 5; ++i) {
              const auto y = net.call(
                  [&] { return evaluate(model->module, model->words); });
              EXPECT_TRUE(all_close(y, expected, 1e-6, 1e-8)) << i;
            }
          },
          kWaitLimit);
    }
  }
}

TEST(TorchScript, Evaluation) {
  expect_same_evaluation();
}

TEST(TorchScript, EvaluationBySimpleExecutor) {
  const Flag executor(torch::jit::getExecutorMode(), false);
  expect_same_evaluation();
}

TEST(TorchScript, DictionariesAndListsOfTensors) {
  auto settings = few_trainings();
  settings.strategies = {Strategy::kFullShard, Strategy::kNoShard};
  const auto make = [] {
    auto module = std::make_shared<torch::jit::Module>("Lists");
    module->register_parameter(
        "a", torch::randn({15, 15}).requires_grad_(), false);
    module->register_parameter("b", torch::randn({15}).requires_grad_(), false);
    module->define(R"(
      def forward(self, named: Dict[str, Tensor], listed: List[Tensor]) -> Dict[str, Tensor]:
          weights = [self.a, self.a.t()]
          y = named["x"]
          for w in weights:
              y = torch.tanh(torch.matmul(y, w))
          stacked = torch.stack([self.b, listed[0], self.b])
          return {"y": y + stacked.sum(0), "z": torch.cat([self.a, listed[1]])}
    )");
    const auto x = torch::randn({kRows, 15});
    const auto b = torch::randn({15});
    const auto z = torch::randn({3, 15});
    return TestModel{
        {{"a", {{"a", module->attr("a").toTensor()}}},
         {"b", {{"b", module->attr("b").toTensor()}}}},
        [=](const Tensor& rows) {
          c10::Dict<std::string, Tensor> named;
          named.insert("x", x.index_select(0, rows));
          const c10::List<Tensor> listed({b, z});
          const auto result = module->forward({named, listed}).toGenericDict();
          return result.at("y").toTensor().pow(2).mean() +
              result.at("z").toTensor().pow(2).mean();
        },
        module};
  };
  expect_same_training(make, settings);
}

TEST(TorchScript, FunctionThatTakesWeightsAsArguments) {
  const auto unit = torch::jit::compile(R"(
    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(torch.linear(x, w, b))
  )");
  expect_same_training(
      chain_with([unit](Chain& chain, const Tensor& rows) {
        auto y = chain.x.index_select(0, rows);
        for (auto& layer : chain.layers) {
          y = unit->run_method("layer", y, layer->weight, layer->bias)
                  .toTensor();
        }
        return y.pow(2).mean();
      }),
      few_trainings());
}

TEST(TorchScript, ForwardOutsideOfARegionIsRefused) {
  run_ranks(
      2,
      [](const World& world) {
        const auto model = build_scripted();
        ShardedTensors net(units_of(model->module), world);
        EXPECT_TRUE(fails_with(
            [&] { model->loss(torch::arange(kRows)); },
            {"aten::embedding", "'table'", "outside of a region"}));
        EXPECT_TRUE(std::isfinite(
            net.call([&] { return model->loss(torch::arange(kRows)); })
                .item<double>()));
      },
      kWaitLimit);
}

} // namespace
} // namespace fsdp::testing
