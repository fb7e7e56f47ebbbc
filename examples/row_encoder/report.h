#pragma once

#include "runs.h"

#include <iosfwd>
#include <vector>

namespace row_encoder {

/// What is about to be trained, and on what.
void print_plan(
    std::ostream& out,
    const Settings& settings,
    const Dataset& data);

/// Losses of every 10th of the first steps beside those of the first run.
void print_losses(
    std::ostream& out,
    const std::vector<Run>& runs,
    double tolerance);

/// Bytes per rank, step time and accuracy of every run.
void print_figures(
    std::ostream& out,
    const std::vector<Run>& runs,
    int64_t batch,
    double baseline_accuracy);

} // namespace row_encoder
