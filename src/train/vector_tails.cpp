#include "train/vector_tails.h"

#include "layout/flat_layout.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <cstring>
#include <utility>

namespace fsdp::detail {

namespace {

/// A multiple of all vectors' lengths.
constexpr int64_t kWholeVectors = kAlignmentNumel;

int64_t rest_of(const at::Tensor& run) {
  return run.numel() % kWholeVectors;
}

void shorten(const at::Tensor& run) {
  run.unsafeGetTensorImpl()->set_sizes_contiguous({run.numel() - rest_of(run)});
}

} // namespace

VectorTails::VectorTails(Runs& runs) {
  Runs result;
  result.state.resize(runs.state.size());
  for (const auto i : c10::irange(runs.parameters.size())) {
    split(runs, i, result);
  }
  runs = std::move(result);
}

void VectorTails::split(const Runs& runs, size_t run, Runs& result) {
  const auto add = [&](auto&& part) {
    result.parameters.push_back(part(runs.parameters[run]));
    result.gradients.push_back(part(runs.gradients[run]));
    for (const auto kind : c10::irange(runs.state.size())) {
      result.state[kind].push_back(part(runs.state[kind][run]));
    }
    result.steps.push_back(runs.steps[run]);
  };
  const auto& parameter = runs.parameters[run];
  const bool has_tail = parameter.is_cpu() && rest_of(parameter) != 0;
  const bool has_vectors = !has_tail || parameter.numel() > kWholeVectors;
  if (has_tail) {
    add([&](const at::Tensor& tensor) { return copy_tail(tensor); });
  }
  if (has_vectors) {
    add([&](const at::Tensor& tensor) {
      if (has_tail) {
        shorten(tensor);
      }
      return tensor;
    });
  }
}

at::Tensor VectorTails::copy_tail(const at::Tensor& run) {
  auto copy = at::zeros({kWholeVectors}, run.options());
  const auto element = run.element_size();
  const auto rest = static_cast<size_t>(rest_of(run)) * element;
  auto* end = static_cast<std::byte*>(run.mutable_data_ptr()) + run.nbytes();
  tails_.push_back(
      {end - rest, static_cast<std::byte*>(copy.mutable_data_ptr()), rest});
  std::memcpy(tails_.back().copy, tails_.back().place, rest);
  return copy;
}

void VectorTails::put_back() {
  for (const auto& tail : tails_) {
    std::memcpy(tail.place, tail.copy, tail.size_bytes);
  }
}

} // namespace fsdp::detail
