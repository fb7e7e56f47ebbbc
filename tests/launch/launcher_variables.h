#pragma once

#include "launch/environment.h"

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace fsdp::testing {

using detail::Environment;

using Map = std::map<std::string, std::string>;

inline detail::GetVariable get_from(const Map& variables) {
  return [variables](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt
                                    : std::optional(found->second);
  };
}

inline Environment read(const Map& variables) {
  return detail::read_environment(get_from(variables));
}

/// The text of the error, which must have all `parts`.
inline void expect_refused(
    const Map& variables,
    const std::vector<std::string>& parts) {
  try {
    read(variables);
    FAIL() << "accepted, expected an error with " << parts.front();
  } catch (const std::invalid_argument& error) {
    for (const auto& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "'" << part << "' is not in: " << error.what();
    }
  }
}

inline Map with(Map variables, const Map& more) {
  for (const auto& [name, value] : more) {
    variables[name] = value;
  }
  return variables;
}

inline Map without(Map variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

/// As torchrun 2.13 sets them, for the second of two hosts.
inline const Map kTorchrun = {
    {"RANK", "5"},
    {"WORLD_SIZE", "8"},
    {"LOCAL_RANK", "1"},
    {"LOCAL_WORLD_SIZE", "4"},
    {"GROUP_RANK", "1"},
    {"MASTER_ADDR", "node1"},
    {"MASTER_PORT", "29511"},
    {"TORCHELASTIC_RUN_ID", "none"},
    {"TORCHELASTIC_RESTART_COUNT", "2"},
    {"TORCHELASTIC_USE_AGENT_STORE", "True"},
};

/// As Open MPI 4.1 sets them on one host.
inline const Map kOpenMpi = {
    {"OMPI_COMM_WORLD_RANK", "1"},
    {"OMPI_COMM_WORLD_SIZE", "2"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
    {"OMPI_COMM_WORLD_NODE_RANK", "1"},
    {"OMPI_MCA_ess_base_jobid", "865992705"},
    {"PMIX_NAMESPACE", "865992705"},
    {"PMIX_RANK", "1"},
};

/// As MPICH 4.0 sets them on one host.
inline const Map kMpich = {
    {"PMI_RANK", "2"},
    {"PMI_SIZE", "3"},
    {"PMI_FD", "6"},
    {"MPI_LOCALRANKID", "2"},
    {"MPI_LOCALNRANKS", "3"},
};

/// The fourth of five tasks of srun, on the third of three nodes.
inline const Map kSlurm = {
    {"SLURM_JOB_ID", "1234567"},
    {"SLURM_STEP_ID", "0"},
    {"SLURM_STEPID", "0"},
    {"SLURM_PROCID", "4"},
    {"SLURM_LOCALID", "0"},
    {"SLURM_NODEID", "2"},
    {"SLURM_NTASKS", "5"},
    {"SLURM_NPROCS", "5"},
    {"SLURM_NNODES", "3"},
    {"SLURM_JOB_NODELIST", "login1,node[003-005]"},
    {"SLURM_STEP_NODELIST", "node[003-005]"},
    {"SLURM_STEP_NUM_TASKS", "5"},
    {"SLURM_STEP_TASKS_PER_NODE", "2(x2),1"},
    {"SLURM_TASKS_PER_NODE", "4(x4)"},
};

} // namespace fsdp::testing
