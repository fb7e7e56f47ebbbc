#include "random/rank_result_bytes.h"

#include <torch/csrc/jit/serialization/pickle.h>

#include <ATen/core/ivalue.h>

#include <vector>

namespace fsdp::random_models {
namespace {

using c10::IValue;

IValue values_to_ivalue(const Values& values) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [name, tensor] : values) {
    dict.insert(name, tensor.defined() ? IValue(tensor) : IValue());
  }
  return dict;
}

Values values_of_ivalue(const IValue& value) {
  Values values;
  for (const auto& each : value.toGenericDict()) {
    values[each.key().toStringRef()] =
        each.value().isNone() ? at::Tensor() : each.value().toTensor();
  }
  return values;
}

} // namespace

std::string to_bytes(const RankResult& result) {
  c10::impl::GenericList gradients(c10::AnyType::get());
  for (const auto& values : result.gradients) {
    gradients.push_back(values_to_ivalue(values));
  }
  c10::Dict<std::string, bool> replicated;
  for (const auto& [name, value] : result.replicated) {
    replicated.insert(name, value);
  }
  const auto bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create(
      {result.losses,
       result.evaluations,
       result.norms,
       gradients,
       values_to_ivalue(result.parameters),
       values_to_ivalue(result.whole),
       replicated}));
  return {bytes.begin(), bytes.end()};
}

RankResult from_bytes(const std::string& bytes) {
  const auto fields = torch::jit::pickle_load({bytes.begin(), bytes.end()});
  const auto& elements = fields.toTupleRef().elements();
  RankResult result;
  result.losses = elements.at(0).toDoubleVector();
  result.evaluations = elements.at(1).toDoubleVector();
  result.norms = elements.at(2).toDoubleVector();
  for (const auto& values : elements.at(3).toListRef()) {
    result.gradients.push_back(values_of_ivalue(values));
  }
  result.parameters = values_of_ivalue(elements.at(4));
  result.whole = values_of_ivalue(elements.at(5));
  for (const auto& each : elements.at(6).toGenericDict()) {
    result.replicated[each.key().toStringRef()] = each.value().toBool();
  }
  return result;
}

} // namespace fsdp::random_models
