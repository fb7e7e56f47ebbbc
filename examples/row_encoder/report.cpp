#include "report.h"

#include "compare.h"

#include <algorithm>
#include <iomanip>
#include <ostream>
#include <sstream>

namespace row_encoder {

namespace {

using Cells = std::vector<std::string>;

std::string fixed(double value, int digits) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(digits) << value;
  return text.str();
}

std::string scientific(double value) {
  std::ostringstream text;
  text << std::scientific << std::setprecision(1) << value;
  return text.str();
}

/// 1234567 as "1,234,567".
std::string grouped(int64_t value) {
  auto text = std::to_string(value);
  for (auto at = static_cast<int64_t>(text.size()) - 3; at > 0; at -= 3) {
    text.insert(static_cast<size_t>(at), ",");
  }
  return text;
}

/// Columns as wide as their longest cell; the first one to the left.
void print_table(std::ostream& out, const std::vector<Cells>& lines) {
  std::vector<size_t> widths(lines.front().size(), 0);
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) {
      widths[i] = std::max(widths[i], line[i].size());
    }
  }
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) {
      out << "  " << (i == 0 ? std::left : std::right)
          << std::setw(static_cast<int>(widths[i])) << line[i];
    }
    out << "\n";
  }
}

int64_t count_parameters(const ModelOptions& options) {
  int64_t numel = 0;
  for (const auto& parameter : build_model(options, 0)->parameters()) {
    numel += parameter.numel();
  }
  return numel;
}

} // namespace

void print_plan(
    std::ostream& out,
    const Settings& settings,
    const Dataset& data) {
  const auto& model = settings.model;
  out << "model: " << model.columns << " numbers a row, d_model "
      << model.d_model << ", layers " << model.layers << ", heads "
      << model.heads << ", feed-forward " << model.feed_forward << ": "
      << grouped(count_parameters(model)) << " parameters\n"
      << "data: " << data.train.rows() << " rows to train on, "
      << data.held_out.rows() << " held out\n"
      << "training: " << settings.steps << " steps of " << settings.batch
      << " rows, learning rate up to " << settings.learning_rate << ", seed "
      << settings.seed << "\n"
      << "sharding: " << name_of(settings.strategy) << ", units "
      << settings.units << ", one core per rank\n\n"
      << std::flush;
}

void print_losses(
    std::ostream& out,
    const std::vector<Run>& runs,
    double tolerance) {
  constexpr size_t kEvery = 10;
  std::vector<Cells> lines(1, {"step"});
  const auto steps =
      std::min(kComparedSteps, runs.front().training.steps.size());
  for (size_t i = 0; i < steps; i += kEvery) {
    const auto step = std::min(i + kEvery, steps);
    lines.push_back({std::to_string(step)});
  }
  std::ostringstream summary;
  for (const auto& run : runs) {
    const auto differences =
        relative_differences(runs.front().training, run.training);
    lines.front().push_back(run.name);
    if (run.sharded) {
      lines.front().push_back("difference");
      summary << "; " << run.name << " " << scientific(largest(differences));
    }
    for (size_t i = 1; i < lines.size(); ++i) {
      const auto step = std::min(i * kEvery, steps) - 1;
      lines[i].push_back(fixed(run.training.steps[step].loss, 7));
      if (run.sharded) {
        lines[i].push_back(scientific(differences[step]));
      }
    }
  }
  out << "\nloss of each step (relative difference to " << runs.front().name
      << ")\n";
  print_table(out, lines);
  out << "largest relative difference over " << steps << " steps"
      << summary.str() << "; limit " << scientific(tolerance) << "\n";
}

void print_figures(
    std::ostream& out,
    const std::vector<Run>& runs,
    int64_t batch,
    double baseline_accuracy) {
  std::vector<Cells> state = {
      {"", "parameters", "gradients", "optimizer", "total", "whole at once"}};
  std::vector<Cells> speed = {{"", "step", "rows/s", "accuracy"}};
  for (const auto& run : runs) {
    const auto& bytes = run.training.state;
    const auto seconds = run.median_step_seconds();
    state.push_back(
        {run.name,
         grouped(bytes.parameters),
         grouped(bytes.gradients),
         grouped(bytes.optimizer),
         grouped(bytes.total()),
         run.sharded ? grouped(run.peak_gathered_bytes) : "-"});
    speed.push_back(
        {run.name,
         fixed(seconds * 1e3, 1) + " ms",
         fixed(static_cast<double>(batch) / seconds, 0),
         fixed(run.training.accuracy, 4)});
  }
  speed.push_back({"nearest mean", "-", "-", fixed(baseline_accuracy, 4)});
  out << "\nbytes of state per rank, the largest of the ranks (and weights that"
         " were whole at once beside it)\n";
  print_table(out, state);
  out << "\nmedian step, all rows per second, and accuracy on held-out rows\n";
  print_table(out, speed);
}

} // namespace row_encoder
