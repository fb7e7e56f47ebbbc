// Trains a row encoder on handwritten digits, sharded over the ranks of a job.
// The parts to read first: model.h (a plain module), train.cpp (the loop, the
// same for a plain and a sharded model) and train_sharded() in runs.cpp.

#include "compare.h"
#include "output_file.h"
#include "report.h"
#include "runs.h"
#include "settings.h"
#include "summary.h"
#include "table.h"

#include <iostream>

namespace row_encoder {

namespace {

constexpr int kFailed = 1; // exit statuses
constexpr int kWrongUsage = 2;

std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace()
                                : error.what();
}

Job make_job(const fsdp::World& world, Settings settings) {
  auto data = split(read_table(settings.data));
  check_fits(settings, world.size(), data.train.rows(), data.held_out.rows());
  settings.model.columns = data.train.x.size(1);
  return {world, std::move(settings), std::move(data)};
}

/// Returns what is wrong with the result; empty without --compare.
std::vector<std::string>
train_and_report(const Job& job, std::ostream& log, std::ostream& summary) {
  const auto& settings = job.settings;
  const auto baseline =
      nearest_centroid_accuracy(job.data, settings.model.classes);
  print_plan(std::cout, settings, job.data);
  const auto runs = train_all(job, log);
  if (settings.compare) {
    print_losses(std::cout, runs, settings.tolerance);
  }
  print_figures(std::cout, runs, settings.batch, baseline);
  auto faults = settings.compare ? find_faults(runs, settings)
                                 : std::vector<std::string>();
  write_summary(summary, job, runs, baseline, faults);
  return faults;
}

/// Rank 0 trains as the others do, and shows and writes what comes out. Returns
/// what is wrong with it.
std::vector<std::string> lead(
    const fsdp::World& world,
    const Settings& settings) {
  OutputFile log(settings.log, "--log");
  OutputFile summary(settings.summary, "--summary");
  std::vector<std::string> faults;
  try {
    const auto job = make_job(world, settings);
    faults = train_and_report(job, log.stream(), summary.stream());
  } catch (const std::exception& error) {
    write_failure(summary.stream(), text_of(error));
    throw;
  }
  log.close();
  summary.close();
  return faults;
}

void follow(const fsdp::World& world, const Settings& settings) {
  std::ostream nowhere(nullptr);
  train_all(make_job(world, settings), nowhere);
}

/// Returns the exit status.
int run(const fsdp::World& world, const Settings& settings) {
  // A rank computes on one core, and so does the unsharded run: what differs is
  // the number of ranks alone.
  at::set_num_threads(1);
  std::vector<std::string> faults;
  if (world.rank() == 0) {
    faults = lead(world, settings);
  } else {
    follow(world, settings);
  }
  world.shutdown();
  for (const auto& fault : faults) {
    std::cerr << "row_encoder: " << fault << "\n";
  }
  return faults.empty() ? 0 : kFailed;
}

int main(int argc, char** argv) {
  std::string who = "row_encoder: ";
  try {
    const auto settings = parse_settings(argc, argv);
    if (!settings.has_value()) {
      return 0;
    }
    const auto world = fsdp::init();
    if (world.size() > 1) {
      who += "rank " + std::to_string(world.rank()) + "/" +
          std::to_string(world.size()) + ": ";
    }
    return run(world, *settings);
  } catch (const UsageError& error) {
    // In one piece, as other ranks may write at the same time.
    std::cerr << who + error.what() +
            "\nrow_encoder --help lists the options.\n";
    return kWrongUsage;
  } catch (const std::exception& error) {
    std::cerr << who + text_of(error) + "\n";
    return kFailed;
  }
}

} // namespace

} // namespace row_encoder

int main(int argc, char** argv) {
  return row_encoder::main(argc, argv);
}
