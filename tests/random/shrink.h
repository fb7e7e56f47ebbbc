#pragma once

#include "random/spec.h"

#include <functional>
#include <vector>

namespace fsdp::random_models {

/// Simpler specs next to `spec`, each normalized and of a lower cost.
std::vector<Spec> simpler(const Spec& spec);

struct Shrunk {
  Spec spec; // no simpler() one of it fails, unless tries ran out
  int tries = 0;
};

/// Simplifies a spec that fails for as long as it fails.
Shrunk shrink(
    Spec spec,
    const std::function<bool(const Spec&)>& fails,
    int max_tries = 400);

} // namespace fsdp::random_models
