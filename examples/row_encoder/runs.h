#pragma once

#include "train.h"

#include <iosfwd>
#include <string>
#include <vector>

namespace row_encoder {

/// What all ranks train.
struct Job {
  fsdp::World world;
  Settings settings;
  Dataset data;
};

/// One training from the first step to the last.
struct Run {
  std::string name; // "unsharded", "2 ranks"
  int ranks = 1;
  bool sharded = false;
  Training training;
  int64_t peak_gathered_bytes = 0; // whole weights at once, on a rank

  double median_step_seconds() const;
};

/// The runs that the settings ask for: the sharded one of all ranks, and before
/// it, with --compare, the unsharded one (which comes first) and one rank. Rank
/// 0 shows progress, writes each step to `log`, and returns them; the other
/// ranks return nothing. Collective.
std::vector<Run> train_all(const Job& job, std::ostream& log);

} // namespace row_encoder
