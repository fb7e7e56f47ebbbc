#pragma once

#include "model.h"

#include <fsdp/fsdp.h>

#include <optional>
#include <stdexcept>
#include <string>

namespace row_encoder {

/// The program was called in a way that cannot work.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// What the command line says.
struct Settings {
  std::string data;
  ModelOptions model;
  int64_t batch = 48; // rows of a step, over all ranks
  int64_t steps = 500;
  double learning_rate = 2e-3; // the highest of the cycle
  uint64_t seed = 1;

  std::string units = "layers";
  fsdp::Strategy strategy = fsdp::Strategy::kFullShard;

  std::string log; // empty: none
  std::string summary;

  bool compare = false;
  double tolerance = 1e-5;
  double min_accuracy = 0.0;
};

/// Throws UsageError. Nothing: the help was asked for, and printed.
std::optional<Settings> parse_settings(int argc, char** argv);

/// What can only be checked once the ranks are there and the data is read.
/// Throws UsageError.
void check_fits(
    const Settings& settings,
    int ranks,
    int64_t train_rows,
    int64_t held_out_rows);

std::string name_of(fsdp::Strategy strategy);

} // namespace row_encoder
