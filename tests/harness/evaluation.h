#pragma once

#include "harness/parity.h"

namespace fsdp::testing {

/// Computes model.loss(all rows), which may be any tensor, without gradients:
/// in a region in every world and strategy of `settings` and on every rank, and
/// unsharded. Expects the same bits.
void expect_same_value(
    const MakeModel& make,
    const ParitySettings& settings = {});

/// The same, of a model that computes in bfloat16.
void expect_same_value_in_bfloat16(
    const MakeModel& make,
    ParitySettings settings = {});

} // namespace fsdp::testing
