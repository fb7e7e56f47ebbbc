#include <fsdp/optim.h>

#include <c10/util/Exception.h>

#include <cmath>
#include <numbers>

namespace fsdp {

WarmupCosine::WarmupCosine(
    torch::optim::Optimizer& optimizer,
    int64_t warmup_steps,
    int64_t total_steps,
    double min_ratio)
    : torch::optim::LRScheduler(optimizer),
      peaks_(get_current_lrs()),
      warmup_steps_(warmup_steps),
      total_steps_(total_steps),
      min_ratio_(min_ratio) {
  TORCH_CHECK_VALUE(
      warmup_steps >= 0 && warmup_steps < total_steps,
      "fsdp: WarmupCosine: expected 0 <= warmup_steps < total_steps, but got"
      " warmup_steps ",
      warmup_steps,
      " and total_steps ",
      total_steps,
      ". Pass the steps of the whole training, warm-up included.");
  TORCH_CHECK_VALUE(
      min_ratio >= 0.0 && min_ratio <= 1.0,
      "fsdp: WarmupCosine: expected 0 <= min_ratio <= 1, but got ",
      min_ratio,
      ". It is the last learning rate divided by the largest.");
  resume_at(0);
}

void WarmupCosine::resume_at(int64_t step) {
  TORCH_CHECK_VALUE(
      step >= 0,
      "fsdp: WarmupCosine: expected a step of at least 0, but got ",
      step,
      ". Pass how many steps the optimizer has taken.");
  step_count_ = static_cast<unsigned>(step);
  LRScheduler::step();
}

std::vector<double> WarmupCosine::get_lrs() {
  std::vector<double> rates;
  for (const double peak : peaks_) {
    rates.push_back(peak * factor(step_count_));
  }
  return rates;
}

double WarmupCosine::factor(int64_t step) const {
  if (step >= total_steps_ - 1) {
    return min_ratio_;
  }
  if (step < warmup_steps_) {
    return static_cast<double>(step + 1) /
        static_cast<double>(warmup_steps_ + 1);
  }
  const double progress = static_cast<double>(step - warmup_steps_) /
      static_cast<double>(total_steps_ - 1 - warmup_steps_);
  return min_ratio_ +
      (1.0 - min_ratio_) * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
}

} // namespace fsdp
