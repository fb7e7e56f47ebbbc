#include "random/rank_training.h"

#include "random/model.h"
#include "random/optimizers.h"

#include <fsdp/fsdp.h>

#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>

namespace fsdp::random_models {
namespace {

constexpr const char* kInjected = "injected by the test";

/// A net over a model, however it was made.
struct Net {
  std::unique_ptr<ShardedModule> module;
  std::function<at::Tensor(const std::function<at::Tensor()>&)> call;
};

template <class M>
Net net_of(std::unique_ptr<M> module) {
  Net net;
  net.call = [raw = module.get()](const std::function<at::Tensor()>& run) {
    if constexpr (std::is_same_v<M, ShardedTensors>) {
      return raw->call(run);
    } else {
      return raw->call([&run](Model& /*model*/) { return run(); });
    }
  };
  net.module = std::move(module);
  return net;
}

Strategy strategy_of(Cut cut) {
  switch (cut) {
    case Cut::kShardGradOp:
      return Strategy::kShardGradOp;
    case Cut::kShardOptimizer:
      return Strategy::kShardOptimizer;
    case Cut::kNoShard:
      return Strategy::kNoShard;
    case Cut::kHybrid:
      return Strategy::kHybridShard;
    default:
      return Strategy::kFullShard;
  }
}

int64_t half_of(int64_t ranks) {
  return ranks % 2 == 0 ? ranks / 2 : 1;
}

Options options_of(const Spec& spec, Cut cut) {
  Options options;
  options.slots(spec.slots);
  options.strategy(strategy_of(cut));
  options.shard_size(half_of(spec.world));
  if (spec.sum) {
    options.gradient_divide_factor(1.0);
  }
  if (spec.numbers == Numbers::kBFloat16) {
    MixedPrecision policy;
    policy.param_dtype = at::kBFloat16;
    if (spec.reduce_float) {
      policy.reduce_dtype = at::kFloat;
    }
    options.mixed_precision(policy);
  }
  return options;
}

/// Which layers are units, and how each is cut.
UnitPolicy policy_of(const Spec& spec, Cut cut) {
  return when(
      [seed = spec.seed, world = spec.world, cut](
          const std::string& name,
          const torch::nn::Module&) -> std::optional<UnitOptions> {
        const auto layer = std::stoul(name.substr(std::strlen("layer")));
        std::mt19937_64 engine(static_cast<uint64_t>(seed) * 1000 + layer);
        if (engine() % 4 == 0 && layer > 0) {
          return std::nullopt; // with the root
        }
        UnitOptions options;
        if (cut == Cut::kPerLayer || cut == Cut::kHybrid) {
          const bool hybrid = cut == Cut::kHybrid;
          options.strategy(static_cast<Strategy>(engine() % (hybrid ? 6 : 4)));
          const auto way = engine() % 4;
          if (way == 0) {
            options.reshard_after_forward(engine() % 2 == 0);
          } else if (way == 1) {
            options.reshard_after_forward_to(hybrid ? 1 : half_of(world));
          }
        }
        return options;
      });
}

Net make_net(
    const std::shared_ptr<Model>& model,
    const World& world,
    const Spec& spec,
    Cut cut) {
  auto options = options_of(spec, cut);
  if (spec.units == Units::kModule) {
    options.units(policy_of(spec, cut));
    return net_of(std::make_unique<FullyShardedDataParallel<Model>>(
        model, world, options));
  }
  return net_of(
      std::make_unique<ShardedTensors>(model->units(), world, options));
}

/// Throws where the spec says, before a layer or in its backward.
void inject(const Spec& spec, int layer, at::Tensor& y) {
  if (layer < spec.fail_layer) {
    return;
  }
  if (!spec.fail_backward) {
    throw std::runtime_error(kInjected);
  }
  if (y.requires_grad()) {
    y.register_hook([](const at::Tensor&) -> at::Tensor {
      throw std::runtime_error(kInjected);
    });
  }
}

class RankTraining {
 public:
  RankTraining(const World& world, const Spec& spec, Cut cut)
      : spec_(spec),
        world_(world),
        model_(std::make_shared<Model>(spec)) {
    parameters_ = model_->unique_parameters();
    if (spec.early) {
      std::vector<at::Tensor> tensors;
      for (const auto& [name, parameter] : parameters_) {
        tensors.push_back(parameter);
      }
      optimizer_ = make_optimizer(spec.optimizer, tensors);
    }
    net_ = make_net(model_, world, spec, cut);
    if (!spec.early) {
      optimizer_ = make_optimizer(spec.optimizer, net_.module->parameters());
    }
  }

  RankResult run() {
    if (spec_.evaluation == Evaluation::kHeld) {
      net_.module->unshard();
    }
    for (int step = 0; step < spec_.steps; ++step) {
      model_->begin_step(step);
      if (step == spec_.fail_step) {
        run_failing(step);
      } else {
        run_micro_batches(step);
        finish_step(step);
      }
    }
    net_.module->check_replicas();
    for (const auto& [name, parameter] : parameters_) {
      result_.parameters[name] = parameter.detach().clone();
    }
    const auto scope = net_.module->whole_parameters();
    for (const auto& [name, parameter] : parameters_) {
      result_.whole[name] = parameter.detach().clone();
    }
    for (const auto& unit : net_.module->describe().units) {
      for (const auto& parameter : unit.parameters) {
        for (const auto& name : parameter.names) {
          result_.replicated[name] = unit.strategy == Strategy::kNoShard;
        }
      }
    }
    return std::move(result_);
  }

 private:
  void run_micro_batches(int step) {
    const auto& kinds = spec_.micro_of(step);
    at::Tensor joint;
    for (int micro = 0; micro < std::ssize(kinds); ++micro) {
      const bool last = micro + 1 == std::ssize(kinds);
      std::optional<NoSync> no_sync;
      if (kinds[static_cast<size_t>(micro)] == 'n') {
        no_sync.emplace(net_.module->no_sync());
      }
      auto loss = forward(make_batch(spec_, step, micro, world_.rank()));
      if (spec_.joint) {
        joint = joint.defined() ? joint + loss : loss;
        loss = last ? joint : at::Tensor();
      }
      if (loss.defined() && !spec_.inside) {
        backward(loss);
      }
    }
  }

  at::Tensor forward(const Batch& batch) {
    auto loss = net_.call([&] {
      auto value = model_->loss(batch);
      if (spec_.inside) {
        backward(value);
      }
      return value;
    });
    result_.losses.push_back(loss.item<double>());
    return loss;
  }

  void backward(const at::Tensor& loss) const {
    loss.backward({}, spec_.again);
    if (spec_.again) {
      loss.backward();
    }
  }

  /// Everything that the step left behind must be undone: by the net, or, as it
  /// is not the net's, here.
  void run_failing(int step) {
    const auto losses = result_.losses.size();
    std::vector<at::Tensor> buffers;
    for (const auto& buffer : model_->buffers()) {
      buffers.push_back(buffer.clone());
    }
    if (world_.rank() == spec_.fail_rank) {
      model_->before_layer = [this, passes = 0](
                                 int layer, at::Tensor& y) mutable {
        if (passes == spec_.fail_micro) {
          inject(spec_, layer, y);
        }
        passes += layer == std::ssize(spec_.layers) ? 1 : 0;
      };
    }
    std::string error = "nothing";
    try {
      run_micro_batches(step);
    } catch (const std::exception& exception) {
      error = exception.what();
    }
    model_->before_layer = nullptr;
    net_.module->drop_unreduced_gradients(); // the step is given up
    if (error.find(kInjected) == std::string::npos) {
      throw std::runtime_error(
          "rank " + std::to_string(world_.rank()) +
          " should throw the injected failure, but threw " + error);
    }
    const torch::NoGradGuard no_grad;
    size_t next = 0;
    for (auto& buffer : model_->buffers()) {
      buffer.copy_(buffers[next++]);
    }
    result_.losses.resize(losses);
    optimizer_->zero_grad();
  }

  void finish_step(int step) {
    Values gradients;
    for (const auto& [name, parameter] : parameters_) {
      const auto& grad = parameter.grad();
      gradients[name] = grad.defined() ? grad.detach().clone() : grad;
    }
    result_.gradients.push_back(std::move(gradients));
    if (spec_.clip > 0.0) {
      result_.norms.push_back(net_.module->clip_grad_norm_(spec_.clip));
    }
    const bool unsharded = spec_.evaluation == Evaluation::kUnsharded;
    if (unsharded) {
      net_.module->unshard();
    }
    optimizer_->step();
    zero_gradients(*optimizer_, spec_);
    if (spec_.evaluation != Evaluation::kNone) {
      evaluate(step);
    }
    if (unsharded) {
      net_.module->reshard();
    }
  }

  void evaluate(int step) {
    const torch::NoGradGuard no_grad;
    model_->eval();
    const auto batch = make_batch(spec_, step, kEvaluation, world_.rank());
    const auto loss = net_.call([&] { return model_->loss(batch); });
    result_.evaluations.push_back(loss.item<double>());
    model_->train();
  }

  const Spec& spec_;
  World world_;
  std::shared_ptr<Model> model_;
  Model::Named parameters_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  Net net_;
  RankResult result_;
};

} // namespace

RankResult train_rank(const World& world, const Spec& spec, Cut cut) {
  return RankTraining(world, spec, cut).run();
}

} // namespace fsdp::random_models
