#pragma once

#include "launch/environment.h"
#include "launch/variables.h"

#include <optional>
#include <string>

namespace fsdp::detail {

/// What Slurm says of a task that srun has started; nothing in any other
/// process, also where it runs inside of an allocation.
std::optional<Environment> read_slurm(const Variables& variables);

/// A text where this process is inside of an allocation for several tasks but
/// was not started by srun; else empty.
std::string unused_slurm_tasks(const Variables& variables);

} // namespace fsdp::detail
