#include "batches.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

namespace row_encoder {

at::Tensor shuffled(int64_t rows, uint64_t seed) {
  // A generator of its own: what else is random changes nothing here.
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randperm(rows, generator, torch::kInt64);
}

Batches::Batches(int64_t rows, int64_t batch, uint64_t seed)
    : rows_(rows),
      batch_(batch),
      seed_(seed) {
}

at::Tensor Batches::at(int64_t step) {
  const auto steps_per_epoch = rows_ / batch_;
  const auto epoch = step / steps_per_epoch;
  if (epoch != epoch_) {
    epoch_ = epoch;
    order_ = shuffled(rows_, seed_ + static_cast<uint64_t>(epoch) + 1);
  }
  return order_.narrow(0, step % steps_per_epoch * batch_, batch_);
}

} // namespace row_encoder
