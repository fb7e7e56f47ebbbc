#pragma once

#include "runtime/net.h"

#include <fsdp/world.h>

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::detail {

/// Runs `prepare` on this rank; when it throws on some rank, all ranks throw:
/// the rank itself what it threw, the others a c10::ValueError with the text of
/// the first that failed. Collective.
void fail_together(const World& world, const std::function<void()>& prepare);

/// Compares on all ranks what `specs` and `settings` say: units, names, shapes,
/// dtypes, flags and options, and, when `values` is set, a checksum of every
/// parameter. All ranks throw the same c10::ValueError, which names the first
/// difference. Collective.
enum class CompareValues : uint8_t { kNo, kYes };
void check_agreement(
    const World& world,
    const std::vector<UnitSpec>& specs,
    const NetSettings& settings,
    CompareValues values);

/// Copies tensors of rank 0 to all ranks, in place. Collective.
void broadcast_tensors(
    const World& world,
    const std::vector<std::pair<std::string, at::Tensor>>& tensors);

/// FNV-1a over the elements in logical order.
uint64_t checksum(const at::Tensor& tensor);

/// Throws unless each of `lines` is the same on all ranks that pass the same
/// `color`; `advice` follows.
void check_same_lines(
    const World& world,
    const std::vector<std::string>& lines,
    const std::string& advice,
    int color = 0);

} // namespace fsdp::detail
