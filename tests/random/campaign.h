#pragma once

#include "random/spec.h"

#include <cstdint>
#include <string>

namespace fsdp::random_models {

struct Campaign {
  uint64_t first_seed = 0;
  int count = 10;
  int progress = 0; // a line every so many models; 0: none
  int max_failures = 1;
};

/// Runs the models of `count` seeds and returns how many failed. Prints each,
/// and the simplest spec that fails, with the line that runs it again.
int run(const Campaign& campaign);

/// Runs one spec; its text is shown if the process crashes. Empty when it
/// passes.
std::string replay(const Spec& spec);

/// An integer from the environment.
int64_t from_environment(const char* name, int64_t usual);

} // namespace fsdp::random_models
