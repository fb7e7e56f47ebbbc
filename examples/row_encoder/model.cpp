#include "model.h"

namespace row_encoder {

namespace nn = torch::nn;

RowEncoderImpl::RowEncoderImpl(const ModelOptions& options) {
  const auto layer =
      nn::TransformerEncoderLayerOptions(options.d_model, options.heads)
          .dim_feedforward(options.feed_forward)
          .dropout(0.0)
          .activation(torch::kGELU); // see [Note: Losses that can be compared]
  number_ = register_module("number", nn::Linear(1, options.d_model));
  column_ = register_module(
      "column", nn::Embedding(options.columns, options.d_model));
  encoder_ = register_module(
      "encoder",
      nn::TransformerEncoder(
          nn::TransformerEncoderOptions(layer, options.layers)));
  head_ = register_module("head", nn::Linear(options.d_model, options.classes));
}

at::Tensor RowEncoderImpl::forward(const at::Tensor& table) {
  // TransformerEncoder wants (sequence, batch, feature): (columns, rows, d).
  const auto numbers = number_(table.t().unsqueeze(-1));
  const auto tokens = numbers + column_->weight.unsqueeze(1);
  return head_(encoder_(tokens).mean(0));
}

RowEncoder build_model(const ModelOptions& options, uint64_t seed) {
  torch::manual_seed(seed);
  return RowEncoder(options);
}

} // namespace row_encoder
