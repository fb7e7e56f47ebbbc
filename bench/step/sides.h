#pragma once

#include "common/workload.h"

#include <functional>
#include <string>

namespace bench {

/// The same training step in the ways that are compared, by name:
///   local     plain libtorch, without communication
///   ours      the library, every parameter sharded
///   no_shard  the library, data parallel (Strategy::kNoShard)
/// Ranks, and the back end of the library, are those of the environment. Runs
/// `use`, on each rank, with a function that makes one step. Throws
/// std::invalid_argument for another name.
void with_side(
    const std::string& side,
    const Workload& workload,
    const std::function<void(const std::function<void()>&)>& use);

} // namespace bench
