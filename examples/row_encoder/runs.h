#pragma once

#include "train.h"

#include <iosfwd>
#include <string>
#include <vector>

namespace row_encoder {

/// One training from the first step to the last.
struct Run {
  std::string name; // "unsharded", "2 ranks"
  int ranks = 1;
  bool sharded = false;
  Training training;
  int64_t peak_gathered_bytes = 0; // whole weights at once, on a rank

  double median_step_seconds() const;
};

/// The runs that `settings` ask for: the sharded one, and before it, with
/// --compare, the unsharded one (which comes first) and one rank. Shows
/// progress, and writes each step to `log`.
std::vector<Run>
run_all(const Settings& settings, const Dataset& data, std::ostream& log);

} // namespace row_encoder
