#include "compare.h"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace row_encoder {

namespace {

template <class... Part>
std::string join(const Part&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

/// Bytes that all ranks hold together. Each element of a sharded model has one
/// owner; without shards every rank holds everything.
int64_t
expected_state(const Run& run, const Run& unsharded, fsdp::Strategy strategy) {
  const auto copies = strategy == fsdp::Strategy::kNoShard ? run.ranks : 1;
  return unsharded.training.state.total() * copies;
}

} // namespace

std::vector<double> relative_differences(
    const Training& expected,
    const Training& actual) {
  std::vector<double> differences;
  const auto steps = std::min(kComparedSteps, expected.steps.size());
  for (size_t i = 0; i < steps; ++i) {
    const auto loss = expected.steps[i].loss;
    differences.push_back(
        std::abs(actual.steps[i].loss - loss) / std::abs(loss));
  }
  return differences;
}

double largest(const std::vector<double>& differences) {
  double most = 0.0;
  for (const auto difference : differences) {
    most = difference <= most ? most : difference;
  }
  return most;
}

std::vector<std::string> find_faults(
    const std::vector<Run>& runs,
    const Settings& settings) {
  std::vector<std::string> faults;
  const auto& unsharded = runs.front();
  for (const auto& run : runs) {
    const auto& training = run.training;
    const auto difference =
        largest(relative_differences(unsharded.training, training));
    if (!(difference <= settings.tolerance)) {
      faults.push_back(join(
          "losses of ",
          run.name,
          " differ by ",
          difference,
          ", more than ",
          settings.tolerance));
    }
    const auto state = expected_state(run, unsharded, settings.strategy);
    if (training.state_of_all_ranks != state) {
      faults.push_back(join(
          "state of ",
          run.name,
          " is ",
          training.state_of_all_ranks,
          " bytes over all ranks, expected ",
          state));
    }
    if (!(training.accuracy >= settings.min_accuracy)) {
      faults.push_back(join(
          "accuracy of ",
          run.name,
          " is ",
          training.accuracy,
          ", less than ",
          settings.min_accuracy));
    }
  }
  return faults;
}

} // namespace row_encoder
