#pragma once

#include <fsdp/world.h>

#include <exception>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::testing {

/// How the main function of a rank has ended.
struct Outcome {
  enum class Kind : char {
    kDone = 'd',
    kCause = 'c',
    kConsequence = 'q', // of what another rank did
  };
  Kind kind = Kind::kDone;
  std::string text;
  std::exception_ptr error = nullptr; // where the rank runs in this process
};

/// Runs `rank_main`; an exception of it fails the peers of this rank.
Outcome run_rank(
    const World& world,
    const std::function<void(const World&)>& rank_main);

/// Throws the cause, or else a consequence, of the lowest rank that has one.
void rethrow_first(const std::vector<Outcome>& by_rank);

} // namespace fsdp::testing
