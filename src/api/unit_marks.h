#pragma once

#include <fsdp/unit_options.h>

#include <torch/nn/module.h>

#include <optional>

namespace fsdp::detail {

/// The options with which fully_shard() marked `module`, if it did. The mark is
/// used up.
std::optional<UnitOptions> take_mark(const torch::nn::Module& module);

} // namespace fsdp::detail
