#include "gpt.h"

namespace gpt {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

BlockImpl::BlockImpl(const ModelOptions& options) : heads_(options.heads) {
  const auto d = options.width;
  norm1_ = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({d})));
  qkv_ = register_module("qkv", nn::Linear(d, 3 * d));
  out_ = register_module("out", nn::Linear(d, d));
  norm2_ = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({d})));
  up_ = register_module("up", nn::Linear(d, 4 * d));
  down_ = register_module("down", nn::Linear(4 * d, d));
}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  const auto attended = x + attend(norm1_(x));
  return attended + down_(F::gelu(up_(norm2_(attended))));
}

at::Tensor BlockImpl::attend(const at::Tensor& x) {
  const auto batch = x.size(0);
  const auto tokens = x.size(1);
  // (batch, tokens, 3, heads, d) to 3 of (batch, heads, tokens, d)
  const auto parts = qkv_(x)
                         .view({batch, tokens, 3, heads_, -1})
                         .permute({2, 0, 3, 1, 4})
                         .unbind();
  const auto attended = at::scaled_dot_product_attention(
      parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
  return out_(attended.transpose(1, 2).reshape({batch, tokens, -1}));
}

GPTImpl::GPTImpl(const ModelOptions& options) {
  embedding_ = register_module(
      "embedding", nn::Embedding(options.vocabulary, options.width));
  blocks_ = register_module("blocks", nn::ModuleList());
  for (int64_t i = 0; i < options.layers; ++i) {
    blocks_->push_back(Block(options));
  }
  norm_ = register_module(
      "norm", nn::LayerNorm(nn::LayerNormOptions({options.width})));
  head_ = register_module(
      "head",
      nn::Linear(
          nn::LinearOptions(options.width, options.vocabulary).bias(false)));
}

at::Tensor GPTImpl::forward(const at::Tensor& tokens) {
  auto x = embedding_(tokens);
  for (const auto& block : *blocks_) {
    x = block->as<Block>()->forward(x);
  }
  return head_(norm_(x));
}

at::Tensor next_token_loss(const at::Tensor& scores, const at::Tensor& tokens) {
  const auto next = tokens.narrow(1, 1, tokens.size(1) - 1);
  return F::cross_entropy(scores.flatten(0, 1), next.flatten());
}

} // namespace gpt
