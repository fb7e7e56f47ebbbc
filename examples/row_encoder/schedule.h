#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace row_encoder {

/// The learning rate of each step: up to `highest` during the first 30 % of the
/// steps, then down to almost nothing, both along a cosine. The formula is that
/// of PyTorch's torch.optim.lr_scheduler.OneCycleLR, in
/// torch/optim/lr_scheduler.py (pct_start 0.3, div_factor 25, final_div_factor
/// 1e4, cycle_momentum False).
class OneCycle {
 public:
  OneCycle(double highest, int64_t steps)
      : highest_(highest),
        peak_(0.3 * static_cast<double>(steps) - 1.0),
        last_(static_cast<double>(steps) - 1.0) {}

  double at(int64_t step) const {
    const double first = highest_ / 25.0;
    const auto now = static_cast<double>(step);
    return now <= peak_
        ? cosine(first, highest_, now / peak_)
        : cosine(highest_, first / 1e4, (now - peak_) / (last_ - peak_));
  }

 private:
  /// From `start` to `end` while `done` goes from 0 to 1.
  static double cosine(double start, double end, double done) {
    return end +
        (start - end) / 2.0 * (1.0 + std::cos(std::numbers::pi * done));
  }

  double highest_;
  double peak_; // the step, not always whole, that has the highest rate
  double last_;
};

} // namespace row_encoder
