#include "summary.h"

#include "compare.h"

#include <fsdp/version.h>

#include <nlohmann/json.hpp>

#include <ostream>

namespace row_encoder {

namespace {

using Json = nlohmann::ordered_json;

Json describe(const Settings& settings, int ranks) {
  return {
      {"columns", settings.model.columns},
      {"d_model", settings.model.d_model},
      {"layers", settings.model.layers},
      {"heads", settings.model.heads},
      {"feed_forward", settings.model.feed_forward},
      {"batch", settings.batch},
      {"steps", settings.steps},
      {"learning_rate", settings.learning_rate},
      {"seed", settings.seed},
      {"ranks", ranks},
      {"units", settings.units},
      {"strategy", name_of(settings.strategy)},
      {"compare", settings.compare},
      {"tolerance", settings.tolerance},
      {"min_accuracy", settings.min_accuracy}};
}

Json describe(const StateBytes& bytes) {
  return {
      {"parameters", bytes.parameters},
      {"gradients", bytes.gradients},
      {"optimizer", bytes.optimizer},
      {"total", bytes.total()}};
}

Json describe(const Run& run, const Run& first, int64_t batch) {
  const auto seconds = run.median_step_seconds();
  const auto differences = relative_differences(first.training, run.training);
  Json losses = Json::array();
  for (const auto& step : run.training.steps) {
    losses.push_back(step.loss);
  }
  return {
      {"name", run.name},
      {"ranks", run.ranks},
      {"sharded", run.sharded},
      {"accuracy", run.training.accuracy},
      {"median_step_seconds", seconds},
      {"rows_per_second", static_cast<double>(batch) / seconds},
      {"state_bytes_per_rank", describe(run.training.state)},
      {"state_bytes_of_all_ranks", run.training.state_of_all_ranks},
      {"peak_gathered_bytes", run.peak_gathered_bytes},
      {"largest_relative_difference", largest(differences)},
      {"relative_differences", differences},
      {"losses", losses}};
}

Json versions() {
  return {{"libfsdp", fsdp::version()}, {"torch", TORCH_VERSION}};
}

void write_json(std::ostream& out, const Json& summary) {
  // A message may have bytes of any kind, such as those of a file's name.
  out << summary.dump(2, ' ', false, Json::error_handler_t::replace) << "\n";
}

} // namespace

void write_summary(
    std::ostream& out,
    const Job& job,
    const std::vector<Run>& runs,
    double baseline_accuracy,
    const std::vector<std::string>& faults) {
  auto summary = versions();
  summary["settings"] = describe(job.settings, job.world.size());
  summary["nearest_centroid_accuracy"] = baseline_accuracy;
  summary["compared_with"] = runs.front().name;
  summary["ok"] = faults.empty();
  summary["faults"] = faults;
  for (const auto& run : runs) {
    summary["runs"].push_back(describe(run, runs.front(), job.settings.batch));
  }
  write_json(out, summary);
}

void write_failure(std::ostream& out, const std::string& error) {
  auto summary = versions();
  summary["ok"] = false;
  summary["faults"] = {error};
  write_json(out, summary);
}

} // namespace row_encoder
