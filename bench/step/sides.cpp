#include "step/sides.h"

#include "common/sharded_training.h"
#include "step/fused_adamw.h"

#include <fsdp/fsdp.h>

#include <stdexcept>

namespace bench {

namespace {

using UseStep = std::function<void(const std::function<void()>&)>;

void with_local(const Workload& workload, const UseStep& use) {
  // The batch need not differ between ranks that do not communicate.
  const auto tokens = make_tokens(workload, /*rank=*/0);
  const auto inputs = tokens.narrow(1, 0, workload.tokens);
  auto model = make_model(workload);
  FusedAdamW optimizer(model->parameters(), kLearningRate);
  use([&] {
    gpt::next_token_loss(model(inputs), tokens).backward();
    optimizer.step();
    optimizer.zero_grad();
  });
}

void with_sharded(
    fsdp::Strategy strategy,
    const Workload& workload,
    const UseStep& use) {
  const auto world = fsdp::init();
  ShardedTraining training(workload, world, strategy);
  use([&] {
    training.compute_gradients();
    training.update();
    training.zero_grad();
  });
  world.shutdown();
}

} // namespace

void with_side(
    const std::string& side,
    const Workload& workload,
    const UseStep& use) {
  if (side == "local") {
    with_local(workload, use);
  } else if (side == "ours") {
    with_sharded(fsdp::Strategy::kFullShard, workload, use);
  } else if (side == "no_shard") {
    with_sharded(fsdp::Strategy::kNoShard, workload, use);
  } else {
    throw std::invalid_argument(
        "--side: expected local, ours or no_shard, but got '" + side + "'.");
  }
}

} // namespace bench
