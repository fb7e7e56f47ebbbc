#pragma once

#include "settings.h"
#include "table.h"

#include <fsdp/fsdp.h>

#include <functional>
#include <vector>

namespace row_encoder {

struct Step {
  int64_t number = 0; // from 1
  double learning_rate = 0.0;
  double loss = 0.0; // mean over the ranks
  double seconds = 0.0;
};

/// Bytes of the tensors that training keeps from step to step.
struct StateBytes {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer = 0;

  int64_t total() const { return parameters + gradients + optimizer; }
};

struct Training {
  std::vector<Step> steps;
  StateBytes state; // of the rank that holds most
  int64_t state_of_all_ranks = 0;
  double accuracy = 0.0; // on held-out rows
};

using OnStep = std::function<void(const Step&)>;

/// The training loop. `Net` is a plain RowEncoder, in a world of its own, or
/// one that is sharded over the ranks of `world`: the same lines serve both.
/// `on_step` may be empty. Throws when the loss is not a number. Collective.
template <class Net>
Training train(
    Net& net,
    const fsdp::World& world,
    const Dataset& data,
    const Settings& settings,
    const OnStep& on_step);

extern template Training train(
    RowEncoder&,
    const fsdp::World&,
    const Dataset&,
    const Settings&,
    const OnStep&);
extern template Training train(
    fsdp::FullyShardedDataParallel<RowEncoderImpl>&,
    const fsdp::World&,
    const Dataset&,
    const Settings&,
    const OnStep&);

} // namespace row_encoder
