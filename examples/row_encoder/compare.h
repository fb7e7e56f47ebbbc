#pragma once

#include "runs.h"

#include <string>
#include <vector>

namespace row_encoder {

/// [Note: Losses that can be compared] Ranks sum in another order than one
/// process does, so the last bits of a float32 differ. In a smooth model that
/// is all: losses agree to about 1e-7. With ReLU, a hidden value within
/// rounding of zero is now and then switched on in one run and off in the
/// other, which changes a gradient by a whole token's share; after 100 steps
/// losses are 1e-5 to 1e-4 apart. The layers use GELU for that reason. Later,
/// as the loss of a batch becomes small, all such differences grow, whatever
/// the model.

/// How many losses must agree.
inline constexpr size_t kComparedSteps = 100;

/// How far the losses of two runs are apart, relative to those of `expected`.
std::vector<double> relative_differences(
    const Training& expected,
    const Training& actual);

/// The largest of them; not a number if one is not.
double largest(const std::vector<double>& differences);

/// What is wrong with `runs`, of which the first is unsharded: empty if losses
/// agree, the ranks together hold what they should, and all are accurate
/// enough.
std::vector<std::string> find_faults(
    const std::vector<Run>& runs,
    const Settings& settings);

} // namespace row_encoder
