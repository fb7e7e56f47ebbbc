#pragma once

#include "api/precision.h"
#include "runtime/net.h"

#include <fsdp/options.h>

#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

namespace fsdp::detail {

/// The units of a module and what was left out.
struct ModuleUnits {
  std::vector<UnitSpec> units; // the root first; no unit is empty
  std::vector<std::pair<std::string, at::Tensor>> ignored;
  /// Further names of ignored parameters.
  std::vector<std::pair<std::string, at::Tensor>> ignored_aliases;
  BufferCasts buffer_casts;
  /// All of them, in order of registration, each once.
  std::vector<std::pair<std::string, at::Tensor>> parameters;
};

/// Applies the unit policy and the ignore list of `options`. Throws
/// c10::ValueError when a policy or an ignored name matches nothing.
ModuleUnits units_of(torch::nn::Module& module, const Options& options);

/// The same for tensors that the program has put into units itself.
ModuleUnits units_of(
    std::vector<
        std::pair<std::string, std::vector<std::pair<std::string, at::Tensor>>>>
        units,
    const Options& options);

} // namespace fsdp::detail
