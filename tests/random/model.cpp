#include "random/model.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <random>
#include <unordered_set>

namespace fsdp::random_models {
namespace {

constexpr int64_t kInputs = 5;
constexpr int64_t kOutputs = 3;

at::ScalarType dtype_of(const Spec& spec) {
  return spec.numbers == Numbers::kDouble ? at::kDouble : at::kFloat;
}

/// Not the default generator, which all threads share.
at::Generator generator_of(uint64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

at::Tensor random_normal(
    at::IntArrayRef sizes,
    double mean,
    double deviation,
    at::Generator& generator) {
  return at::randn(sizes, generator, at::kDouble).mul_(deviation).add_(mean);
}

struct Shape {
  const char* name;
  std::vector<int64_t> sizes;
  double mean = 0.0;
  double deviation = 0.1;
};

std::vector<Shape> matrix_and_bias(
    const LayerSpec& layer,
    std::vector<int64_t> sizes,
    int64_t bias) {
  const double deviation = 1.0 / std::sqrt(static_cast<double>(layer.in));
  std::vector<Shape> shapes = {{"weight", std::move(sizes), 0.0, deviation}};
  if (layer.bias) {
    shapes.push_back({"bias", {bias}});
  }
  return shapes;
}

std::vector<Shape> recurrent_shapes(const LayerSpec& layer, int64_t gates) {
  const double deviation = 1.0 / std::sqrt(static_cast<double>(layer.out));
  std::vector<Shape> shapes = {
      {"weight_ih", {gates * layer.out, layer.in}, 0.0, deviation},
      {"weight_hh", {gates * layer.out, layer.out}, 0.0, deviation}};
  if (layer.bias) {
    shapes.push_back({"bias_ih", {gates * layer.out}});
    shapes.push_back({"bias_hh", {gates * layer.out}});
  }
  return shapes;
}

/// Floating parameters of a layer; the first is its weight.
std::vector<Shape> shapes_of(const LayerSpec& layer) {
  const int64_t in = layer.in;
  const int64_t out = layer.out;
  switch (layer.kind) {
    case Kind::kScale:
    case Kind::kNorm:
    case Kind::kBatchNorm: {
      std::vector<Shape> shapes = {{"weight", {in}, 1.0, 0.1}};
      if (layer.bias) {
        shapes.push_back({"bias", {in}});
      }
      return shapes;
    }
    case Kind::kScalar:
      return {{"weight", {}, 1.0, 0.1}};
    case Kind::kLinear:
    case Kind::kCustom:
      return matrix_and_bias(layer, {out, in}, out);
    case Kind::kEmpty:
      return {{"weight", {0, in}}};
    case Kind::kEmbedding:
      return {{"weight", {out, in}, 0.0, 0.5}};
    case Kind::kConv:
      return matrix_and_bias(layer, {out, in, 3}, out);
    case Kind::kMlp: {
      auto shapes = matrix_and_bias(layer, {out, in}, out);
      shapes.push_back({"weight2", {in, out}, 0.0, 0.3});
      shapes.push_back({"bias2", {in}});
      return shapes;
    }
    case Kind::kWeightNorm: {
      auto shapes = matrix_and_bias(layer, {out, in}, out);
      shapes.insert(shapes.begin() + 1, {"gain", {}, 1.5, 0.1});
      return shapes;
    }
    case Kind::kCat:
      return {{"weight", {out, in}, 0.0, 0.4}, {"weight2", {2, in}, 0.0, 0.4}};
    case Kind::kTied:
      return layer.bias ? std::vector<Shape>{{"gain", {1}, 1.0, 0.1}}
                        : std::vector<Shape>{};
    case Kind::kIndex:
    case Kind::kBorrow:
      return {};
    case Kind::kAttention: {
      auto shapes = matrix_and_bias(layer, {3 * in, in}, 3 * in);
      shapes.push_back({"output", {in, in}, 0.0, 0.3});
      return shapes;
    }
    case Kind::kGru:
      return recurrent_shapes(layer, 3);
    case Kind::kLstm:
      return recurrent_shapes(layer, 4);
  }
  return {};
}

} // namespace

Batch make_batch(const Spec& spec, int step, int micro, int rank) {
  const int data_rank = spec.same ? 0 : rank;
  auto generator = generator_of(
      static_cast<uint64_t>(spec.seed) * 1000 +
      static_cast<uint64_t>(step * 100 + micro * 10 + data_rank));
  const int64_t rows = spec.rows + (spec.uneven ? rank : 0);
  Batch batch;
  batch.x =
      random_normal({rows, kInputs}, 0.0, 1.0, generator).to(dtype_of(spec));
  batch.target =
      random_normal({rows, kOutputs}, 0.0, 1.0, generator).to(dtype_of(spec));
  batch.ids = at::randint(0, 1000, {rows}, generator, at::kLong);
  batch.step = step;
  batch.rank = rank;
  return batch;
}

Model::Model(const Spec& spec, Side side)
    : spec_(spec),
      side_(side),
      casts_(side == Side::kReference && spec.numbers == Numbers::kBFloat16) {
  auto generator = generator_of(static_cast<uint64_t>(spec.seed));
  layers_.reserve(spec.layers.size());
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    add_layer(i, generator);
  }
  head_ = register_parameter(
      "head",
      random_normal({kOutputs}, 1.0, 0.1, generator).to(dtype_of(spec)));
}

void Model::add_layer(size_t index, at::Generator& generator) {
  Layer layer;
  layer.spec = spec_.layers[index];
  const auto name = "layer" + std::to_string(index);
  layer.module =
      register_module(name, std::make_shared<torch::nn::Module>(name));
  const auto dtype = layer.spec.wide ? at::kDouble : dtype_of(spec_);
  for (const auto& shape : shapes_of(layer.spec)) {
    layer.parameters.push_back(layer.module->register_parameter(
        shape.name,
        random_normal(shape.sizes, shape.mean, shape.deviation, generator)
            .to(dtype),
        !layer.spec.frozen));
  }
  if (layer.spec.kind == Kind::kIndex) {
    layer.parameters.push_back(layer.module->register_parameter(
        "index",
        at::randint(0, layer.spec.in, {layer.spec.out}, generator, at::kLong),
        /*requires_grad=*/false));
  }
  if (layer.spec.kind == Kind::kTied) {
    const auto& weight =
        layers_[static_cast<size_t>(layer.spec.from)].parameters.front();
    layer.parameters.insert(layer.parameters.begin(), weight);
    layer.module->register_parameter("weight", weight, weight.requires_grad());
  }
  if (layer.spec.kind == Kind::kBatchNorm) {
    layer.running_mean = layer.module->register_buffer(
        "running_mean", at::zeros({layer.spec.in}, dtype));
    layer.running_var = layer.module->register_buffer(
        "running_var", at::ones({layer.spec.in}, dtype));
  }
  layers_.push_back(std::move(layer));
}

void Model::begin_step(int step) {
  for (auto& layer : layers_) {
    if (step == 0 || layer.spec.flip != step) {
      continue;
    }
    const size_t own = layer.spec.kind == Kind::kTied ? 1 : 0;
    for (size_t i = own; i < layer.parameters.size(); ++i) {
      if (layer.parameters[i].is_floating_point()) {
        layer.parameters[i].requires_grad_(layer.spec.frozen);
      }
    }
  }
}

at::Tensor Model::loss(const Batch& batch) {
  // Backward reaches the first layer even where its weights are detached.
  const auto x = batch.x.detach().requires_grad_(at::GradMode::is_enabled());
  auto y = x;
  int index = 0;
  for (auto& layer : layers_) {
    if (before_layer) {
      before_layer(index, y);
    }
    ++index;
    const bool skipped = (layer.spec.skip >> batch.step & 1) != 0;
    y = skipped ? fit(y, layer.spec.out) : run_layer(layer, y, batch);
  }
  y = meet(fit(y, kOutputs)) * use(head_);
  auto loss = (at::tanh(y) - batch.target).pow(2).mean();
  if (before_layer) {
    before_layer(index, loss);
  }
  if (spec_.slope && at::GradMode::is_enabled()) {
    const auto slope = torch::autograd::grad(
        {y.sum()},
        {x},
        /*grad_outputs=*/{},
        /*retain_graph=*/true,
        /*create_graph=*/true)[0];
    loss = loss + slope.pow(2).mean() * 0.1;
  }
  return loss + penalties();
}

at::Tensor Model::penalties() const {
  auto sum = at::zeros({}, dtype_of(spec_));
  for (const auto& layer : layers_) {
    if (layer.spec.penalty) {
      sum = sum +
          use(layer.parameters.front()).pow(2).sum().to(sum.scalar_type()) *
              0.01;
    }
  }
  return sum;
}

Model::Named Model::unique_parameters() const {
  Named unique;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& parameter : named_parameters()) {
    if (seen.insert(parameter.value().unsafeGetTensorImpl()).second) {
      unique.emplace_back(parameter.key(), parameter.value());
    }
  }
  return unique;
}

std::vector<std::pair<std::string, Model::Named>> Model::units() const {
  const auto count = spec_.units == Units::kOne ? 1
      : spec_.units == Units::kLayer            ? layers_.size() + 1
      : spec_.units == Units::kParameter
      ? named_parameters().size()
      : static_cast<size_t>(spec_.unit_count);
  std::vector<std::pair<std::string, Named>> units(count);
  for (size_t i = 0; i < count; ++i) {
    units[i].first = "unit" + std::to_string(i);
  }
  std::mt19937_64 engine(static_cast<uint64_t>(spec_.seed));
  size_t index = 0;
  for (const auto& parameter : named_parameters()) {
    const auto& name = parameter.key();
    size_t unit = 0;
    if (spec_.units == Units::kLayer) { // "layer12.weight", "head"
      unit = name == "head" ? layers_.size() : std::stoul(name.substr(5));
    } else if (spec_.units == Units::kParameter) {
      unit = index++;
    } else if (spec_.units == Units::kMixed) {
      unit = engine() % count;
    }
    units[unit].second.emplace_back(name, parameter.value());
  }
  return units;
}

} // namespace fsdp::random_models
