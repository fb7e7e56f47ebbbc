#pragma once

#include "common/workload.h"
#include "gpt.h"

#include <fsdp/fsdp.h>
#include <torch/torch.h>

namespace bench {

/// Training of a workload with the library: one unit per block, the root takes
/// the rest.
class ShardedTraining {
 public:
  ShardedTraining(
      const Workload& workload,
      const fsdp::World& world,
      fsdp::Strategy strategy);

  /// Forward and backward pass.
  void compute_gradients();
  void update();
  void zero_grad();

  using Net = fsdp::FullyShardedDataParallel<gpt::GPTImpl>;
  Net& net() { return net_; }

 private:
  at::Tensor tokens_; // (batch, tokens + 1)
  at::Tensor inputs_; // (batch, tokens)
  Net net_;
  fsdp::AdamW optimizer_;
};

} // namespace bench
