// Saved-tensor hooks of the program, and anomaly mode.

#include "harness/chain.h"

#include "runtime/unit_storage.h"

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <atomic>

namespace fsdp::testing {
namespace {

using at::Tensor;
using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

enum class Weights : uint8_t { kCopied, kLeftAlone };

std::atomic<int> packed = 0;

/// Keeps a copy of what autograd saves.
class CopyHooks final : public SavedVariableHooks {
 public:
  explicit CopyHooks(Weights weights) : weights_(weights) {}

  void call_pack_hook(const Tensor& tensor) override {
    ++packed;
    const torch::NoGradGuard no_grad;
    const bool is_weight = detail::unit_storage(tensor) != nullptr;
    kept_ =
        is_weight && weights_ == Weights::kLeftAlone ? tensor : tensor.clone();
  }
  Tensor call_unpack_hook() override { return kept_; }

 private:
  Weights weights_;
  Tensor kept_;
};

/// What a C++ program does to have hooks on all saved tensors.
class HookEngine final : public Engine {
 public:
  ~HookEngine() override { stop(); }
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks()
      override {
    // The library keeps calling an engine that it has met.
    return enabled ? std::make_unique<CopyHooks>(weights) : nullptr;
  }
  bool enabled = false;
  Weights weights = Weights::kCopied;
};

HookEngine& hook_engine() {
  static auto* engine = new HookEngine; // its threads outlive main
  return *engine;
}

/// Installs the program's engine and puts the former one back.
class InstalledEngine {
 public:
  explicit InstalledEngine(Weights weights) {
    former() = &Engine::get_default_engine();
    hook_engine().weights = weights;
    hook_engine().enabled = true;
    torch::autograd::set_default_engine_stub(
        +[]() -> Engine& { return hook_engine(); });
  }
  ~InstalledEngine() {
    hook_engine().enabled = false;
    if (&Engine::get_default_engine() == &hook_engine()) {
      torch::autograd::set_default_engine_stub(
          +[]() -> Engine& { return *former(); });
    } // else the library's own has taken its place
  }
  InstalledEngine(const InstalledEngine&) = delete;
  InstalledEngine& operator=(const InstalledEngine&) = delete;

 private:
  static Engine*& former() {
    static Engine* engine = nullptr;
    return engine;
  }
};

void expect_hooks_of_engine(Weights weights) {
  const InstalledEngine installed(weights);
  ParitySettings settings;
  settings.world_sizes = {2};
  settings.strategies = {Strategy::kFullShard};
  settings.hybrid = false;
  packed = 0;
  const auto make = chain_with(
      [](Chain& chain, const Tensor& rows) { return chain.loss(rows); });
  train_unsharded(make, settings);
  const int expected = packed;
  EXPECT_GT(expected, 0);
  packed = 0;
  expect_same_training(make, settings); // once plain and once on each rank
  EXPECT_EQ(packed, (1 + count_of_ranks_here(2)) * expected);
}

TEST(SavedTensors, EngineOfTheProgramKeepsItsHooks) {
  // In a process of its own, the first engine is there before the first net.
  expect_hooks_of_engine(Weights::kCopied);
  expect_hooks_of_engine(Weights::kLeftAlone);
}

TEST(SavedTensors, HooksOnNodesOfTheGraph) {
  for (const auto weights : {Weights::kCopied, Weights::kLeftAlone}) {
    packed = 0;
    expect_same_training(chain_with([weights](
                                        Chain& chain, const Tensor& rows) {
      auto y = chain.x.index_select(0, rows).requires_grad_();
      for (auto& layer : chain.layers) {
        y = y.mm(layer->weight) + layer->bias;
        auto* sum = y.grad_fn().get();
        auto* product = dynamic_cast<torch::autograd::generated::MmBackward0*>(
            sum->next_edge(0).function.get());
        TORCH_CHECK(product != nullptr);
        product->mat2_.register_hooks(std::make_unique<CopyHooks>(weights));
        product->self_.register_hooks(std::make_unique<CopyHooks>(weights));
        y = torch::tanh(y);
      }
      return y.pow(2).mean();
    }));
    EXPECT_GT(packed, 0);
  }
}

TEST(SavedTensors, AnomalyModeFindsANanAndTrainingGoesOn) {
  struct Anomaly {
    Anomaly() { torch::autograd::AnomalyMode::set_enabled(true); }
    ~Anomaly() { torch::autograd::AnomalyMode::set_enabled(false); }
  };
  const Anomaly anomaly;
  ParitySettings settings; // short: it takes a stack trace of each node
  settings.steps = 2;
  settings.world_sizes = {2};
  settings.strategies = {Strategy::kFullShard};
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        const auto loss = net.call([&] {
          const auto y = chain.forward(chain.x);
          return (y * 0).sqrt().sum() * 0; // 0 * infinity in backward
        });
        EXPECT_TRUE(
            fails_with([&] { loss.backward(); }, {"returned nan values"}));
        for (const auto& parameter : chain.parameters()) {
          EXPECT_FALSE(parameter.grad().defined());
        }
      },
      settings);
}

} // namespace
} // namespace fsdp::testing
