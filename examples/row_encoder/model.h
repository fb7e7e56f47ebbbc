#pragma once

#include <torch/torch.h>

namespace row_encoder {

struct ModelOptions {
  int64_t columns = 64;
  int64_t classes = 10;
  int64_t d_model = 64;
  int64_t layers = 3;
  int64_t heads = 8;
  int64_t feed_forward = 128;
};

/// Classifies rows of a table of numbers: every number becomes a token, the
/// tokens of a row attend to one another, and their mean is classified. A plain
/// libtorch module, which knows nothing of ranks.
class RowEncoderImpl : public torch::nn::Module {
 public:
  explicit RowEncoderImpl(const ModelOptions& options);

  /// Scores (rows, classes) of `table` (rows, columns).
  at::Tensor forward(const at::Tensor& table);

 private:
  torch::nn::Linear number_{nullptr};
  torch::nn::Embedding column_{nullptr};
  torch::nn::TransformerEncoder encoder_{nullptr};
  torch::nn::Linear head_{nullptr};
};
TORCH_MODULE(RowEncoder);

/// The same initial weights on every call with the same seed.
RowEncoder build_model(const ModelOptions& options, uint64_t seed);

} // namespace row_encoder
