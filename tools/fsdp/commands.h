#pragma once

namespace fsdp::tool {

constexpr int kUsageError = 2;

// Each sub-command gets the arguments from its own name on, and returns what
// the tool exits with.

/// Starts the ranks of a job on this host.
int run_command(int argc, char** argv);

} // namespace fsdp::tool
