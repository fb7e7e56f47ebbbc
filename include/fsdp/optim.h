#pragma once

#include <fsdp/export.h>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <vector>

namespace fsdp {

/// libtorch's optimizer of the same name, with its constructors, options, param
/// groups, state and archives: a program exchanges torch::optim::AdamW for
/// fsdp::AdamW and nothing else. Only step() differs: it calls libtorch's fused
/// kernels, for shards that lie side by side once for all of them. It serves
/// ordinary parameters as well. (The same holds for Adam and SGD below.)
///
/// step() evaluates the closure if there is one, with gradients enabled, and
/// returns its value. Parameters without a gradient are left alone, and their
/// step does not count. Each rank updates its shards: local, but where ranks
/// share memory it waits until the others have ended their passes. Throws
/// before a parameter is changed: inside a region, for sparse gradients, and
/// for state in whole shapes from before sharding, which ShardedModule::adopt()
/// cuts.
///
/// Complex parameters are updated as pairs of real numbers, like in Python; the
/// Adam of C++ squares them as complex numbers.
class FSDP_API AdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
};

/// See AdamW.
class FSDP_API Adam : public torch::optim::Adam {
 public:
  using torch::optim::Adam::Adam;
  at::Tensor step(LossClosure closure = nullptr) override;
};

/// See AdamW.
class FSDP_API SGD : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override;
};

/// Learning rates that rise linearly, and then fall along half a cosine. With
/// the rate `peak` that a param group has when the schedule is made, W =
/// `warmup_steps`, T = `total_steps` and `m` = `min_ratio`, the i-th step of
/// the optimizer, from 0, is taken with
///
///   peak * (i + 1) / (W + 1)                              for i < W,
///   peak * (m + (1 - m) * (1 + cos(pi * p)) / 2)          for W <= i < T - 1,
///       p = (i - W) / (T - 1 - W),
///   peak * m                                              from i = T - 1 on.
///
/// Making it sets the rate of step 0; call step() after each step of the
/// optimizer, which must outlive it.
class FSDP_API WarmupCosine : public torch::optim::LRScheduler {
 public:
  /// Throws unless 0 <= warmup_steps < total_steps and 0 <= min_ratio <= 1.
  WarmupCosine(
      torch::optim::Optimizer& optimizer,
      int64_t warmup_steps,
      int64_t total_steps,
      double min_ratio = 0.0);

  /// Sets the rate of step `step` of the optimizer, to go on from there. Make
  /// the schedule before the optimizer is loaded: that overwrites the rates
  /// from which it takes the peaks.
  void resume_at(int64_t step);

 private:
  std::vector<double> get_lrs() override;
  double factor(int64_t step) const;

  std::vector<double> peaks_;
  int64_t warmup_steps_;
  int64_t total_steps_;
  double min_ratio_;
};

} // namespace fsdp
