#pragma once

#include "runs.h"

#include <iosfwd>
#include <string>
#include <vector>

namespace row_encoder {

/// Writes every figure, with the losses of all steps, as JSON.
void write_summary(
    std::ostream& out,
    const Settings& settings,
    const std::vector<Run>& runs,
    double baseline_accuracy,
    const std::vector<std::string>& faults);

} // namespace row_encoder
