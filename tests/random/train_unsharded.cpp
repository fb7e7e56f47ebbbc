// The reference: one model, one thread, no library. A pass over the batch of
// each rank in turn; gradients are their mean.

#include "random/model.h"
#include "random/optimizers.h"
#include "random/run.h"

#include <algorithm>

namespace fsdp::random_models {
namespace {

class UnshardedTraining {
 public:
  explicit UnshardedTraining(const Spec& spec)
      : spec_(spec),
        model_(spec, Side::kReference),
        parameters_(model_.unique_parameters()),
        pending_(parameters_.size()) {
    std::vector<at::Tensor> tensors;
    for (const auto& [name, parameter] : parameters_) {
      tensors.push_back(parameter);
    }
    optimizer_ = make_optimizer(spec.optimizer, tensors);
    const bool ranks_differ = std::any_of(
        spec.layers.begin(), spec.layers.end(), [](const LayerSpec& layer) {
          return layer.absent != 0 || layer.detached != 0;
        });
    passes_ = spec.same && !ranks_differ ? 1 : spec.world;
  }

  Training run() {
    for (int step = 0; step < spec_.steps; ++step) {
      model_.begin_step(step);
      if (step == spec_.fail_step) {
        optimizer_->zero_grad();
        continue;
      }
      const auto& kinds = spec_.micro_of(step);
      const int count = spec_.joint ? static_cast<int>(kinds.size()) : 1;
      for (int first = 0; first < std::ssize(kinds); first += count) {
        run_micro_batches(step, first, count);
        if (kinds[static_cast<size_t>(first + count - 1)] == 's') {
          reduce_pending();
        }
      }
      finish_step(step);
    }
    for (const auto& [name, parameter] : parameters_) {
      result_.parameters[name] = parameter.detach().clone();
    }
    return std::move(result_);
  }

 private:
  /// Exchanges .grad with the sums that wait for a reduction.
  void swap_gradients() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      std::swap(parameters_[i].second.mutable_grad(), pending_[i]);
    }
  }

  /// One backward pass for `count` micro-batches.
  void run_micro_batches(int step, int first, int count) {
    swap_gradients();
    std::vector<double> means(static_cast<size_t>(count));
    for (int rank = 0; rank < passes_; ++rank) {
      auto sum = at::zeros({}, at::kDouble);
      for (int i = 0; i < count; ++i) {
        auto loss = model_.loss(make_batch(spec_, step, first + i, rank));
        means[static_cast<size_t>(i)] += loss.item<double>() / passes_;
        sum = sum + loss;
      }
      sum.backward({}, spec_.again);
      if (spec_.again) {
        sum.backward();
      }
    }
    result_.losses.insert(result_.losses.end(), means.begin(), means.end());
    swap_gradients();
  }

  void reduce_pending() {
    const double factor = !spec_.sum ? 1.0 / passes_
        : passes_ == 1               ? spec_.world
                                     : 1.0;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!pending_[i].defined()) {
        continue;
      }
      auto mean = pending_[i].mul(factor);
      pending_[i].reset();
      auto& grad = parameters_[i].second.mutable_grad();
      grad = grad.defined() ? grad + mean : mean;
    }
  }

  void finish_step(int step) {
    Values gradients;
    std::vector<at::Tensor> tensors;
    for (const auto& [name, parameter] : parameters_) {
      const auto& grad = parameter.grad();
      gradients[name] = grad.defined() ? grad.clone() : grad;
      tensors.push_back(parameter);
    }
    result_.gradients.push_back(std::move(gradients));
    if (spec_.clip > 0.0) {
      result_.norms.push_back(
          torch::nn::utils::clip_grad_norm_(tensors, spec_.clip));
    }
    optimizer_->step();
    zero_gradients(*optimizer_, spec_);
    if (spec_.evaluation != Evaluation::kNone) {
      evaluate(step);
    }
  }

  void evaluate(int step) {
    const torch::NoGradGuard no_grad;
    model_.eval();
    double sum = 0.0;
    for (int rank = 0; rank < passes_; ++rank) {
      sum += model_.loss(make_batch(spec_, step, kEvaluation, rank))
                 .item<double>();
    }
    model_.train();
    result_.evaluations.push_back(sum / passes_);
  }

  const Spec& spec_;
  Model model_;
  Model::Named parameters_;
  std::vector<at::Tensor> pending_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  int passes_ = 1;
  Training result_;
};

} // namespace

Training train_unsharded(const Spec& spec) {
  return UnshardedTraining(spec).run();
}

} // namespace fsdp::random_models
