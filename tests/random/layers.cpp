// What each kind of layer computes.

#include "random/model.h"

namespace fsdp::random_models {

using at::Tensor;

namespace {

/// Large, so that normalisation does not amplify rounding where rows are
/// constant.
constexpr double kEps = 0.1;

} // namespace

/// A weight as it computes.
Tensor Model::use(const Tensor& parameter) const {
  if (casts_ && parameter.defined() && parameter.is_floating_point()) {
    return parameter.to(at::kBFloat16);
  }
  return parameter;
}

/// An activation that meets a weight in one operator.
Tensor Model::meet(const Tensor& x) const {
  return casts_ ? x.to(at::kBFloat16) : x;
}

Tensor Model::linear(const Tensor& x, const Tensor& w, const Tensor& b) const {
  return at::linear(meet(x), use(w), use(b));
}

Tensor Model::run_layer(Layer& layer, const Tensor& x, const Batch& batch) {
  // All ranks make the same change; the one model of the reference makes it
  // once.
  const bool in_charge = side_ == Side::kSharded || batch.rank == 0;
  if (layer.spec.written && is_training() && in_charge) {
    const torch::NoGradGuard no_grad;
    layer.parameters.front().mul_(0.9);
  }
  const auto compute = [this, &layer, batch](const Tensor& input) {
    auto used = layer;
    if ((layer.spec.detached >> batch.rank & 1) != 0) {
      for (auto& parameter : used.parameters) {
        parameter = parameter.detach();
      }
    }
    const auto dtype = input.scalar_type();
    auto y = fit(input, layer.spec.in);
    y = run_kind(used, layer.spec.wide ? y.to(at::kDouble) : y, batch);
    return layer.spec.wide ? y.to(dtype) : y;
  };
  const auto whole = [compute, twice = layer.spec.twice](const Tensor& input) {
    return twice ? compute(compute(input)) : compute(input);
  };
  if (layer.spec.checkpoint && at::GradMode::is_enabled()) {
    return checkpoint(whole, x);
  }
  return whole(x);
}

Tensor Model::run_recurrent(Layer& layer, const Tensor& x) const {
  std::vector<Tensor> weights;
  for (const auto& parameter : layer.parameters) {
    weights.push_back(use(parameter));
  }
  const auto input = meet(x).unsqueeze(1);
  const auto state = at::zeros({1, 1, layer.spec.out}, input.options());
  if (layer.spec.kind == Kind::kGru) {
    return std::get<0>(at::gru(
                           input,
                           state,
                           weights,
                           layer.spec.bias,
                           /*num_layers=*/1,
                           /*dropout=*/0.0,
                           is_training(),
                           /*bidirectional=*/false,
                           /*batch_first=*/false))
        .squeeze(1);
  }
  const std::vector<Tensor> states = {state, state};
  return std::get<0>(at::lstm(
                         input,
                         states,
                         weights,
                         layer.spec.bias,
                         /*num_layers=*/1,
                         /*dropout=*/0.0,
                         is_training(),
                         /*bidirectional=*/false,
                         /*batch_first=*/false))
      .squeeze(1);
}

Tensor Model::run_attention(Layer& layer, const Tensor& x) const {
  const int64_t width = layer.spec.in;
  const auto& weight = layer.parameters[0];
  const auto& bias = layer.spec.bias ? layer.parameters[1] : Tensor();
  std::vector<Tensor> qkv;
  for (int64_t i = 0; i < 3; ++i) {
    const auto slice = [&](const Tensor& whole) {
      return whole.defined() ? whole.slice(0, i * width, (i + 1) * width)
                             : whole;
    };
    qkv.push_back(
        linear(x, slice(weight), slice(bias)).unsqueeze(0).unsqueeze(0));
  }
  const auto attended = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
                            .squeeze(0)
                            .squeeze(0);
  return x + linear(attended, layer.parameters.back(), Tensor());
}

/// What is, at its core, a linear map by one weight.
Tensor Model::run_linear(Layer& layer, const Tensor& x, const Tensor& bias)
    const {
  const auto& spec = layer.spec;
  const auto& p = layer.parameters;
  switch (spec.kind) {
    case Kind::kConv: {
      const auto columns = meet(x).t().unsqueeze(0);
      return at::conv1d(columns, use(p[0]), use(bias), 1, 1).squeeze(0).t();
    }
    case Kind::kWeightNorm: {
      const auto w = use(p[0]);
      const auto scaled = w / (w.norm() + 0.1) * use(p[1]);
      return at::linear(x.to(scaled.scalar_type()), scaled, use(bias));
    }
    case Kind::kCat: {
      const auto joined = at::cat({use(p[0]), use(p[1])}, 0);
      return at::linear(x.to(joined.scalar_type()), joined);
    }
    case Kind::kTied: {
      const auto& lender = layers_[static_cast<size_t>(spec.from)].spec;
      const auto w = spec.transposed ? use(p[0]).t() : use(p[0]);
      const auto dtype = lender.wide ? at::kDouble : x.scalar_type();
      const auto y = at::linear(meet(fit(x, w.size(1)).to(dtype)), w);
      return spec.bias ? meet(y.to(x.scalar_type())) * use(p.back())
                       : y.to(x.scalar_type());
    }
    case Kind::kCustom: {
      const auto y = custom_linear(x, use(p[0]));
      return bias.defined() ? meet(y) + use(bias) : y;
    }
    default:
      return linear(x, p[0], bias);
  }
}

Tensor Model::run_kind(Layer& layer, const Tensor& x, const Batch& batch) {
  const auto& spec = layer.spec;
  const auto& p = layer.parameters;
  const bool absent = (spec.absent >> batch.rank & 1) != 0;
  const auto bias = spec.bias && !absent && !p.empty() ? p.back() : Tensor();
  switch (spec.kind) {
    case Kind::kScale: {
      const auto y = meet(x) * use(p[0]);
      return bias.defined() ? meet(y) + use(bias) : y;
    }
    case Kind::kScalar:
      return meet(x) * use(p[0]);
    case Kind::kEmpty:
      return at::cat({meet(x), use(p[0])}, 0);
    case Kind::kIndex:
      return x.index_select(1, p[0]);
    case Kind::kNorm:
      return at::layer_norm(meet(x), {spec.in}, use(p[0]), use(bias), kEps);
    case Kind::kEmbedding:
      return x + at::embedding(use(p[0]), batch.ids.remainder(spec.out));
    case Kind::kBatchNorm:
      return at::batch_norm(
          x,
          p[0],
          bias,
          layer.running_mean,
          layer.running_var,
          is_training(),
          /*momentum=*/0.1,
          kEps,
          /*cudnn_enabled=*/false);
    case Kind::kMlp: {
      const auto first_bias = spec.bias ? p[1] : Tensor();
      const auto hidden = at::tanh(linear(x, p[0], first_bias));
      return x + linear(hidden, p[p.size() - 2], p.back());
    }
    case Kind::kBorrow: {
      const auto& lender = layers_[static_cast<size_t>(spec.from)];
      const auto flat = use(lender.parameters.front()).reshape({-1});
      const auto index = torch::arange(x.size(1)).remainder(flat.numel());
      const auto borrowed = flat.index_select(0, index).to(x.scalar_type());
      return x * (1.0 + 0.1 * at::tanh(borrowed));
    }
    case Kind::kAttention:
      return run_attention(layer, x);
    case Kind::kGru:
    case Kind::kLstm:
      return run_recurrent(layer, x);
    default:
      return at::tanh(run_linear(layer, x, bias));
  }
}

} // namespace fsdp::random_models
