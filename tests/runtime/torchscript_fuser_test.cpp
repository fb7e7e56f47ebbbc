// Fused kernels of TorchScript read memory without operators. A program that
// trains TorchScript modules switches them off before the first run of the
// module: torch::jit::setTensorExprFuserEnabled(false). Without that the error
// is clear.

#include "harness/chain.h"
#include "scripted_models.h"

#include <torch/csrc/jit/codegen/fuser/interface.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/tensorexpr/kernel.h>

namespace fsdp::testing {
namespace {

using at::Tensor;

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
  Tensor run() { return evaluate(module, x); }
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
    run_ranks(
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
    run_ranks(
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

TEST(TorchScriptFuser, PlansFromBeforeItWasSwitchedOffAreAClearError) {
  for (const int world_size : {1, 2}) {
    const ForcedFuser forced(true);
    run_ranks(
        world_size,
        [&](const World& world) {
          const auto model = build_pointwise();
          for (int i = 0; i < 4; ++i) {
            model->run();
          }
          torch::jit::setTensorExprFuserEnabled(false);
          ShardedTensors net(model->units(), world);
          EXPECT_TRUE(fails_with(
              [&] { net.call([&] { return model->run(); }); },
              {"without an operator", "fsdp::touch(weight)"}));
        },
        kWaitLimit);
  }
}

} // namespace
} // namespace fsdp::testing
