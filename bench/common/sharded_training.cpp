#include "common/sharded_training.h"

namespace bench {

ShardedTraining::ShardedTraining(
    const Workload& workload,
    const fsdp::World& world,
    fsdp::Strategy strategy)
    : tokens_(make_tokens(workload, world.rank())),
      inputs_(tokens_.narrow(1, 0, workload.tokens)),
      net_(
          make_model(workload),
          world,
          fsdp::Options().strategy(strategy).units(fsdp::each<gpt::Block>())),
      optimizer_(net_.parameters(), torch::optim::AdamWOptions(kLearningRate)) {
}

void ShardedTraining::compute_gradients() {
  gpt::next_token_loss(net_(inputs_), tokens_).backward();
}

void ShardedTraining::update() {
  optimizer_.step();
}

void ShardedTraining::zero_grad() {
  optimizer_.zero_grad();
}

} // namespace bench
