#pragma once

#include "random/spec.h"

#include <array>
#include <string_view>

namespace fsdp::random_models {

/// Names of enumerators, in their order.
template <class E>
struct Names;

template <>
struct Names<Kind> {
  static constexpr std::array<std::string_view, 18> kAll = {
      "scale",
      "scalar",
      "linear",
      "empty",
      "index",
      "norm",
      "embed",
      "bnorm",
      "conv",
      "mlp",
      "wnorm",
      "cat",
      "borrow",
      "tied",
      "custom",
      "attn",
      "gru",
      "lstm"};
};
template <>
struct Names<Numbers> {
  static constexpr std::array<std::string_view, 3> kAll = {
      "f64",
      "f32",
      "bf16"};
};
template <>
struct Names<Units> {
  static constexpr std::array<std::string_view, 5> kAll =
      {"one", "layer", "parameter", "mixed", "module"};
};
template <>
struct Names<OptimizerKind> {
  static constexpr std::array<std::string_view, 5> kAll =
      {"sgd", "momentum", "adamw", "adagrad", "rmsprop"};
};
template <>
struct Names<Evaluation> {
  static constexpr std::array<std::string_view, 4> kAll = {
      "none",
      "forward",
      "unsharded",
      "held"};
};

/// Calls visit(name, field) for the fields of a layer but its kind.
template <class L, class V>
void visit_fields_of_layer(L& layer, V&& visit) {
  visit("in", layer.in);
  visit("out", layer.out);
  visit("from", layer.from);
  visit("transposed", layer.transposed);
  visit("bias", layer.bias);
  visit("frozen", layer.frozen);
  visit("twice", layer.twice);
  visit("checkpoint", layer.checkpoint);
  visit("wide", layer.wide);
  visit("penalty", layer.penalty);
  visit("written", layer.written);
  visit("skip", layer.skip);
  visit("absent", layer.absent);
  visit("detached", layer.detached);
  visit("flip", layer.flip);
}

/// Calls visit(name, field) for the fields of a spec but its layers.
template <class S, class V>
void visit_fields(S& spec, V&& visit) {
  visit("seed", spec.seed);
  visit("world", spec.world);
  visit("rows", spec.rows);
  visit("uneven", spec.uneven);
  visit("same", spec.same);
  visit("numbers", spec.numbers);
  visit("reduce_float", spec.reduce_float);
  visit("units", spec.units);
  visit("unit_count", spec.unit_count);
  visit("slots", spec.slots);
  visit("optimizer", spec.optimizer);
  visit("early", spec.early);
  visit("steps", spec.steps);
  visit("micro", spec.micro);
  visit("sum", spec.sum);
  visit("clip", spec.clip);
  visit("evaluation", spec.evaluation);
  visit("keep_zeros", spec.keep_zeros);
  visit("inside", spec.inside);
  visit("again", spec.again);
  visit("joint", spec.joint);
  visit("slope", spec.slope);
  visit("fail_step", spec.fail_step);
  visit("fail_micro", spec.fail_micro);
  visit("fail_rank", spec.fail_rank);
  visit("fail_layer", spec.fail_layer);
  visit("fail_backward", spec.fail_backward);
}

} // namespace fsdp::random_models
