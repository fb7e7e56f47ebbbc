#pragma once

#include <torch/torch.h>

namespace gpt {

struct ModelOptions {
  int64_t layers = 4;
  int64_t width = 64;
  int64_t heads = 4; // must divide width
  int64_t vocabulary = 128;
};

/// Causal self-attention and a feed-forward layer, each added to its input.
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const ModelOptions& options);

  /// (batch, tokens, width), and the same out.
  at::Tensor forward(const at::Tensor& x);

 private:
  at::Tensor attend(const at::Tensor& x);

  int64_t heads_;
  torch::nn::LayerNorm norm1_{nullptr};
  torch::nn::Linear qkv_{nullptr};
  torch::nn::Linear out_{nullptr};
  torch::nn::LayerNorm norm2_{nullptr};
  torch::nn::Linear up_{nullptr};
  torch::nn::Linear down_{nullptr};
};
TORCH_MODULE(Block);

/// A small language model without positions. A plain libtorch module: the same
/// names, shapes and order of initialisation as tests/interop/gpt.py.
class GPTImpl : public torch::nn::Module {
 public:
  explicit GPTImpl(const ModelOptions& options);

  /// Scores (batch, tokens, vocabulary) of the next token.
  at::Tensor forward(const at::Tensor& tokens);

 private:
  torch::nn::Embedding embedding_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};
};
TORCH_MODULE(GPT);

/// Mean cross entropy over all positions of `scores`, which GPT computed from
/// all but the last of `tokens` (batch, tokens + 1).
at::Tensor next_token_loss(const at::Tensor& scores, const at::Tensor& tokens);

} // namespace gpt
