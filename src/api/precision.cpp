#include "api/precision.h"

#include "api/name_pattern.h"
#include "runtime/internal_guard.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace fsdp::detail {

namespace {

/// Of a rule that names several modules.
void check_patterns(
    const torch::nn::Module& root,
    const UnitPolicy::Rule& rule) {
  const auto modules = root.named_modules();
  for (const auto& pattern : rule.patterns) {
    TORCH_CHECK_VALUE(
        std::any_of(
            modules.begin(),
            modules.end(),
            [&](const auto& each) {
              return name_matches(pattern, each.key());
            }),
        "fsdp: Options::full_precision: ",
        rule.description,
        ": \"",
        pattern,
        "\" matches no module.");
  }
}

} // namespace

std::unordered_set<const torch::nn::Module*> modules_of(
    const torch::nn::Module& root,
    const UnitPolicy& policy) {
  std::unordered_set<const torch::nn::Module*> found;
  for (const auto& rule : policy.rules()) {
    check_patterns(root, rule);
    bool matched = false;
    for (const auto& named : root.named_modules()) {
      const auto& module = *named.value();
      if (named.key().empty() ||
          !rule.match({named.key(), module, 0}).has_value()) {
        continue;
      }
      matched = true;
      for (const auto& below : module.modules()) {
        found.insert(below.get());
      }
    }
    TORCH_CHECK_VALUE(
        matched,
        "fsdp: Options::full_precision: ",
        rule.description,
        " matches no module. Names and types are those that describe() and"
        " Module::name() give.");
  }
  return found;
}

void add_buffer_casts(
    BufferCasts& casts,
    const torch::nn::Module& module,
    at::ScalarType dtype) {
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    const auto& tensor = buffer.value();
    if (tensor.defined() && tensor.is_floating_point()) {
      casts.emplace_back(tensor, dtype);
    }
  }
}

void cast_buffers(const BufferCasts& casts) {
  const InternalGuard internal;
  const at::NoGradGuard no_grad;
  for (const auto& [tensor, dtype] : casts) {
    if (tensor.scalar_type() != dtype) {
      tensor.set_data(tensor.to(dtype));
    }
  }
}

} // namespace fsdp::detail
