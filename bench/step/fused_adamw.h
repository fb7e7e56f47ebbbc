#pragma once

#include <torch/torch.h>

#include <vector>

namespace bench {

/// AdamW by the kernel that Python's AdamW(fused=True) calls, on whole
/// parameters: libtorch has no such optimizer for C++.
class FusedAdamW {
 public:
  FusedAdamW(std::vector<at::Tensor> parameters, double learning_rate);

  void step();
  void zero_grad();

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> averages_;
  std::vector<at::Tensor> squares_;
  std::vector<at::Tensor> steps_; // 0-d, float
  double learning_rate_;
};

} // namespace bench
