#pragma once

#include "runs.h"

#include <iosfwd>
#include <string>
#include <vector>

namespace row_encoder {

/// Writes every figure, with the losses of all steps, as JSON. `faults`: what
/// is wrong with the runs.
void write_summary(
    std::ostream& out,
    const Job& job,
    const std::vector<Run>& runs,
    double baseline_accuracy,
    const std::vector<std::string>& faults);

/// What is left to write when training has failed.
void write_failure(std::ostream& out, const std::string& error);

} // namespace row_encoder
