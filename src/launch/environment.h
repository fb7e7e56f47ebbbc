#pragma once

#include "launch/settings.h"
#include "launch/variables.h"

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp::detail {

enum class Launcher : uint8_t {
  kNone,      // the program was started alone
  kVariables, // RANK and WORLD_SIZE, set by somebody else
  kFsdpRun,
  kTorchrun,
  kOpenMpi,
  kMpich,
  kIntelMpi,
  kSlurm,
};

/// "torchrun", "Open MPI"
std::string name_of(Launcher launcher);

/// What the launcher tells this process about its job. Names and precedence of
/// the variables are listed in docs/launch.md.
struct Environment {
  Launcher launcher = Launcher::kNone;
  int rank = 0;
  int size = 1;
  /// Among the ranks of this host; both are known, or neither.
  std::optional<int> local_rank = std::nullopt;
  std::optional<int> local_size = std::nullopt;

  /// Where the ranks find each other, as far as the launcher says. From
  /// LIBFSDP_STORE where that is set.
  std::optional<StoreAddress> store = std::nullopt;
  /// Whether somebody else has opened the store, so that rank 0 must not.
  bool store_is_served = false;

  /// The same on all ranks, and in no other job: all that the launcher says of
  /// the job's name. Empty where it says nothing.
  std::string job;
  /// The variable that tells the rank; empty when there is none.
  std::string rank_variable;
  /// Something that the user should know, such as an allocation of several
  /// tasks that is not used; empty when there is nothing.
  std::string note;

  bool on_one_host() const { return local_size == size; }
};

/// Throws std::invalid_argument for variables that can not be right: it names
/// them, their values and what was expected.
Environment read_environment(const GetVariable& get);

/// Why there is no store, and how to name one.
std::string missing_store_text(const Environment& environment);

/// The port that jobs of Slurm use where MASTER_PORT is not set: 20000 to
/// 29999, which is below the ports that Linux gives away.
int slurm_port(int64_t job_id, int64_t step_id);

} // namespace fsdp::detail
