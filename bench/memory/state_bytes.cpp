#include "memory/state_bytes.h"

#include "common/sharded_training.h"
#include "memory/counting_allocator.h"
#include "memory/shared_memory.h"

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>

namespace bench {

namespace {

constexpr int kWarmUpSteps = 2; // the second finds all buffers in place
constexpr int64_t kBytesPerParameter = 16; // weight, gradient, two of AdamW

/// The most bytes of whole gradients in a step, sampled when a gradient of any
/// parameter arrives.
class GradientPeak {
 public:
  explicit GradientPeak(ShardedTraining::Net& net) : net_(net) {
    for (const auto& parameter : net.parameters()) {
      parameter.register_hook(
          [this](const at::Tensor& /*gradient*/) { sample(); });
    }
  }

  void reset() { peak_bytes_ = 0; }
  int64_t bytes() const { return peak_bytes_; }

 private:
  void sample() {
    peak_bytes_ = std::max(peak_bytes_, net_.memory().unreduced_gradient_bytes);
  }

  ShardedTraining::Net& net_;
  int64_t peak_bytes_ = 0;
};

struct Sizes {
  int64_t parameters = 0;   // elements of the whole model
  int64_t largest_unit = 0; // bytes
};

Sizes sizes_of(const ShardedTraining::Net& net) {
  Sizes sizes;
  sizes.parameters =
      net.memory().whole_model_bytes / static_cast<int64_t>(sizeof(float));
  for (const auto& unit : net.describe().units) {
    sizes.largest_unit = std::max(sizes.largest_unit, unit.whole_bytes);
  }
  return sizes;
}

void train(ShardedTraining& training, int steps) {
  for (int step = 0; step < steps; ++step) {
    training.compute_gradients();
    training.update();
    training.zero_grad();
  }
}

} // namespace

nlohmann::json measure_state(
    const Workload& workload,
    const fsdp::World& world) {
  const auto before = bench_live_bytes();
  ShardedTraining training(workload, world, fsdp::Strategy::kFullShard);
  auto& net = training.net();
  const auto sizes = sizes_of(net);
  GradientPeak gradients(net);
  train(training, kWarmUpSteps);

  // Weights that ranks share are not in the allocator, and a gather of them
  // copies nothing.
  const auto shared = shared_memory_bytes() / world.size();
  const auto weights = net.memory().shard_bytes;
  const auto shared_weights = shared > 0 ? weights : 0;
  // Without gradients there are only weights and what the optimizer keeps.
  const auto optimizer_bytes =
      bench_live_bytes() - before - (weights - shared_weights);

  gradients.reset();
  net.reset_peak_memory();
  bench_reset_peak();
  training.compute_gradients();
  training.update();
  const auto peak_bytes = bench_peak_bytes() - before + shared_weights;
  // No report has gradients that are reduced while others are still whole. But
  // the sum of the peaks of all kinds, and all tensors with activations, are
  // both at least the state.
  const auto report = net.memory();
  const auto peaks = report.shard_bytes + report.gradient_bytes +
      optimizer_bytes + report.peak_gathered_bytes + gradients.bytes();
  return {
      {"values",
       {{"parameters", sizes.parameters},
        {"rest_bytes", bench_live_bytes() - before + shared_weights},
        {"rest_theory_bytes",
         kBytesPerParameter * sizes.parameters / world.size()},
        {"staging_bytes", shared - shared_weights},
        {"peak_state_bytes", std::min(peaks, peak_bytes)},
        {"largest_unit_bytes", sizes.largest_unit},
        {"weight_slots", shared > 0 ? 0 : fsdp::Options().slots()},
        {"peak_bytes", peak_bytes}}}};
}

} // namespace bench
