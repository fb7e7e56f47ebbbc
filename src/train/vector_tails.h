#pragma once

#include "train/runs.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace fsdp::detail {

/// [Note: Vector tails] libtorch's kernels for CPUs compute whole vectors in
/// one way and what is left at the end of a tensor in another, in double
/// precision or with other contractions: the last bit of a few results differs
/// (seen in 2.11 to 2.15). Where a parameter ends in a tensor would then depend
/// on world size and strategy. So the last elements of each run are updated as
/// whole vectors on a copy that is padded with zeros, and an element gets the
/// same bits wherever it lies.
class VectorTails {
 public:
  /// Shortens the runs to whole vectors, and adds the copies as runs.
  explicit VectorTails(Runs& runs);

  /// Copies the results to where they belong.
  void put_back();

 private:
  struct Tail {
    std::byte* place;
    std::byte* copy;
    size_t size_bytes;
  };
  void split(const Runs& runs, size_t run, Runs& result);
  at::Tensor copy_tail(const at::Tensor& run);

  std::vector<Tail> tails_;
};

} // namespace fsdp::detail
