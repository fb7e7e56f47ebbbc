#include "harness/mixed_precision.h"

namespace fsdp::testing {

MasterWeights::MasterWeights(
    const std::vector<std::pair<std::string, at::Tensor>>& parameters,
    const ComputeType& compute_type) {
  for (const auto& [name, parameter] : parameters) {
    const auto own_type = parameter.scalar_type();
    const auto type = at::isFloatingType(own_type)
        ? compute_type(name).value_or(own_type)
        : own_type;
    auto master = parameter;
    if (type != own_type) {
      master = parameter.detach().clone();
      master.set_requires_grad(parameter.requires_grad());
    }
    weights_.push_back({name, parameter, master, type});
  }
}

void MasterWeights::hand_out() {
  for (auto& weight : weights_) {
    if (weight.is_cast()) {
      weight.parameter.set_data(weight.master.detach().to(weight.compute_type));
    }
  }
}

void MasterWeights::take_back() {
  const torch::NoGradGuard no_grad;
  for (auto& weight : weights_) {
    if (!weight.is_cast()) {
      continue;
    }
    const auto type = weight.master.scalar_type();
    auto gradient = std::exchange(weight.parameter.mutable_grad(), {});
    if (gradient.defined()) {
      weight.master.mutable_grad() = gradient.to(type);
    }
    const auto written =
        weight.master.to(weight.compute_type).ne(weight.parameter);
    weight.master.copy_(
        at::where(written, weight.parameter.to(type), weight.master));
  }
}

std::vector<at::Tensor> MasterWeights::masters() const {
  std::vector<at::Tensor> masters;
  for (const auto& weight : weights_) {
    masters.push_back(weight.master);
  }
  return masters;
}

std::vector<std::pair<std::string, at::Tensor>> MasterWeights::values() const {
  std::vector<std::pair<std::string, at::Tensor>> values;
  for (const auto& weight : weights_) {
    values.emplace_back(weight.name, weight.master.detach().clone());
  }
  return values;
}

namespace {

Training train_with_masters(
    const MakeModel& make,
    const ParitySettings& settings,
    at::ScalarType compute_type) {
  const auto model = build(make);
  MasterWeights weights(tensors_of(model.units), [&](const std::string&) {
    return compute_type;
  });
  const auto optimizer = make_optimizer(weights.masters(), settings);
  Training training;
  for (int step = 0; step < settings.steps; ++step) {
    weights.hand_out();
    const auto loss = model.loss(torch::arange(kRows));
    loss.backward();
    weights.take_back();
    optimizer->step();
    optimizer->zero_grad();
    training.losses.push_back(loss.item<double>());
  }
  training.parameters = weights.values();
  return training;
}

} // namespace

void expect_same_training_in_bfloat16(
    const MakeModel& make,
    ParitySettings settings) {
  expect_same_training_in_bfloat16_as(make, make, std::move(settings));
}

void expect_same_training_in_bfloat16_as(
    const MakeModel& make_with_casts,
    const MakeModel& make,
    ParitySettings settings) {
  SCOPED_TRACE("computing in bfloat16");
  settings.batch = Batch::kSame;
  settings.options.mixed_precision(
      {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
  expect_same_training_as(
      train_with_masters(make_with_casts, settings, at::kBFloat16),
      make,
      settings);
}

void expect_same_training_in_both_types(
    const MakeModel& make,
    const ParitySettings& settings) {
  expect_same_training(make, settings);
  expect_same_training_in_bfloat16(make, settings);
}

} // namespace fsdp::testing
