#pragma once

#include "schedule/recorded_passes.h"

#include <cstdint>
#include <span>

namespace fsdp::detail {

struct UnitMemory {
  int64_t bytes = 0; // of the whole unit
  /// Stays whole once it was gathered (see Schedule::keep).
  bool kept = false;
};

/// The most bytes that are whole at once while passes with the touches `pass`
/// run one after the other: the first one, which is recorded, and those that
/// follow it and gather ahead. It is what Schedule decides with `slots` slots,
/// where no operator runs inside of another one.
///
/// Throws std::invalid_argument for a unit that is not in `units`, or fewer
/// slots than 1.
int64_t peak_whole_bytes(
    std::span<const UnitTouch> pass,
    std::span<const UnitMemory> units,
    int64_t slots);

} // namespace fsdp::detail
