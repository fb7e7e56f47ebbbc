#pragma once

#include "common/workload.h"

#include <fsdp/world.h>
#include <nlohmann/json.hpp>

namespace bench {

/// Trains a few steps with the library and returns what this rank holds, in
/// bytes ("values" in the answer to the conductor): at rest, at the peak of a
/// step, and what theory says.
nlohmann::json measure_state(
    const Workload& workload,
    const fsdp::World& world);

} // namespace bench
