// Trains a row encoder on handwritten digits, sharded over several ranks.
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

/// Returns what is wrong with the result; empty without --compare.
std::vector<std::string> run(Settings settings) {
  const auto data = split(read_table(settings.data));
  check_fits(settings, data.train.rows(), data.held_out.rows());
  settings.model.columns = data.train.x.size(1);
  OutputFile log(settings.log, "--log");
  OutputFile summary(settings.summary, "--summary");
  const auto baseline = nearest_centroid_accuracy(data, settings.model.classes);

  print_plan(std::cout, settings, data);
  const auto runs = run_all(settings, data, log.stream());
  if (settings.compare) {
    print_losses(std::cout, runs, settings.tolerance);
  }
  print_figures(std::cout, runs, settings.batch, baseline);
  auto faults = settings.compare ? find_faults(runs, settings)
                                 : std::vector<std::string>();
  write_summary(summary.stream(), settings, runs, baseline, faults);
  log.close();
  summary.close();
  return faults;
}

/// The last line of --compare: of a fault that has more lines, the first.
void print_verdict(const std::vector<std::string>& faults) {
  std::cout << "demo: " << (faults.empty() ? "ok" : "FAILED: ");
  for (size_t i = 0; i < faults.size(); ++i) {
    std::cout << (i == 0 ? "" : "; ")
              << faults[i].substr(0, faults[i].find('\n'));
  }
  std::cout << std::endl;
}

std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace()
                                : error.what();
}

int main(int argc, char** argv) {
  bool compare = false;
  try {
    const auto settings = parse_settings(argc, argv);
    if (!settings.has_value()) {
      return 0;
    }
    compare = settings->compare;
    const auto faults = run(*settings);
    if (compare) {
      print_verdict(faults);
    }
    return faults.empty() ? 0 : 1;
  } catch (const UsageError& error) {
    std::cerr << "row_encoder: " << error.what()
              << "\nrow_encoder --help lists the options.\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "row_encoder: " << text_of(error) << "\n";
    if (compare) {
      print_verdict({text_of(error)});
    }
    return 1;
  }
}

} // namespace

} // namespace row_encoder

int main(int argc, char** argv) {
  return row_encoder::main(argc, argv);
}
