#pragma once

#include <ATen/core/Tensor.h>

namespace row_encoder {

/// 0 to `rows` - 1 in an order that depends on `seed` alone.
at::Tensor shuffled(int64_t rows, uint64_t seed);

/// The rows of each step's global batch: the same for any number of ranks, so
/// that runs with different numbers of ranks can be compared.
class Batches {
 public:
  Batches(int64_t rows, int64_t batch, uint64_t seed);

  /// Rows of the global batch of `step`. Each epoch visits the rows in another
  /// order; what is left at its end, less than a batch, is skipped.
  at::Tensor at(int64_t step);

 private:
  int64_t rows_;
  int64_t batch_;
  uint64_t seed_;
  int64_t epoch_ = -1;
  at::Tensor order_; // of epoch_
};

} // namespace row_encoder
