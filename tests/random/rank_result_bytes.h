#pragma once

#include "random/rank_training.h"

#include <string>

namespace fsdp::random_models {

/// What a rank saw, for other processes.
std::string to_bytes(const RankResult& result);
RankResult from_bytes(const std::string& bytes);

} // namespace fsdp::random_models
