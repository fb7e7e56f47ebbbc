#pragma once

#include "random/run.h"

namespace fsdp::random_models {

/// What one rank saw: its own losses and its parts of gradients and parameters.
struct RankResult {
  std::vector<double> losses;
  std::vector<double> evaluations;
  std::vector<double> norms;
  std::vector<Values> gradients;
  Values parameters;
  Values whole; // parameters as whole_parameters() shows them
  std::map<std::string, bool> replicated; // whether this rank holds all of it
};

/// Collective.
RankResult train_rank(const World& world, const Spec& spec, Cut cut);

} // namespace fsdp::random_models
