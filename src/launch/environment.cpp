#include "launch/environment.h"

#include "launch/slurm.h"

#include <cstdint>
#include <stdexcept>
#include <utility>

namespace fsdp::detail {

namespace {

constexpr int64_t kMostRanks = int64_t{1} << 20;

/// The names under which a launcher tells who this process is.
struct RankVariables {
  std::string rank;
  std::string size;
  std::string local_rank;
  std::string local_size;
};

const RankVariables kPlain{
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE"};
const RankVariables kOpenMpi{
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE"};
const RankVariables kPmi{
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS"};

std::string quoted(const Variables& variables, const std::string& name) {
  return name + "=\"" + variables.text(name).value_or("") + "\"";
}

[[noreturn]] void refuse_without(
    const Variables& variables,
    const std::string& set,
    const std::string& missing) {
  throw std::invalid_argument(
      "fsdp: environment variable " + quoted(variables, set) + " is set, but " +
      missing +
      " is not. A launcher sets both; unset the one, or set the other.");
}

/// A number of ranks, and a rank below it.
struct Place {
  int rank = 0;
  int size = 1;
};

std::optional<Place> read_place(
    const Variables& variables,
    const std::string& rank_name,
    const std::string& size_name) {
  const auto size = variables.number(size_name, 1, kMostRanks);
  const auto rank = variables.number(rank_name, 0, kMostRanks - 1);
  if (!size && !rank) {
    return std::nullopt;
  }
  if (!size) {
    refuse_without(variables, rank_name, size_name);
  }
  if (!rank) {
    refuse_without(variables, size_name, rank_name);
  }
  if (*rank >= *size) {
    variables.refuse(rank_name, "less than " + quoted(variables, size_name));
  }
  return Place{static_cast<int>(*rank), static_cast<int>(*size)};
}

/// The place on this host. LOCAL_RANK alone, without a size, tells nothing that
/// could be relied upon.
void read_local_place(
    const Variables& variables,
    const RankVariables& names,
    Environment& environment) {
  if (!variables.has(names.local_rank) || !variables.has(names.local_size)) {
    return;
  }
  const auto local =
      read_place(variables, names.local_rank, names.local_size).value();
  if (local.size > environment.size) {
    variables.refuse(
        names.local_size, "at most " + quoted(variables, names.size));
  }
  environment.local_rank = local.rank;
  environment.local_size = local.size;
}

std::optional<Environment> read_ranks(
    const Variables& variables,
    const RankVariables& names,
    Launcher launcher) {
  const auto place = read_place(variables, names.rank, names.size);
  if (!place.has_value()) {
    return std::nullopt;
  }
  Environment environment;
  environment.launcher = launcher;
  environment.rank = place->rank;
  environment.size = place->size;
  environment.rank_variable = names.rank;
  read_local_place(variables, names, environment);
  return environment;
}

/// A text of all of `names` that are set.
std::string join_texts(
    const Variables& variables,
    const std::vector<std::string>& names) {
  std::string joined;
  for (const auto& name : names) {
    if (const auto text = variables.text(name)) {
      joined += (joined.empty() ? "" : "|") + *text;
    }
  }
  return joined;
}

std::optional<Environment> read_plain(const Variables& variables) {
  if (!variables.has(kPlain.rank)) {
    return std::nullopt; // WORLD_SIZE alone is compared below
  }
  auto environment = read_ranks(variables, kPlain, Launcher::kVariables);
  if (variables.has("TORCHELASTIC_RUN_ID")) {
    environment->launcher = Launcher::kTorchrun;
    environment->store_is_served =
        variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  } else if (variables.has("LIBFSDP_JOB")) {
    environment->launcher = Launcher::kFsdpRun;
  }
  environment->job = join_texts(
      variables,
      {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "LIBFSDP_JOB"});
  return environment;
}

std::optional<Environment> read_open_mpi(const Variables& variables) {
  auto environment = read_ranks(variables, kOpenMpi, Launcher::kOpenMpi);
  if (environment.has_value()) {
    environment->job = join_texts(
        variables,
        {"LIBFSDP_JOB", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"});
  }
  return environment;
}

/// Slurm's plugin for PMI-2 sets PMI_RANK as well; it says less than Slurm.
std::optional<Environment> read_pmi(
    const Variables& variables,
    const std::optional<Environment>& slurm) {
  const bool is_intel =
      variables.has("I_MPI_MPIRUN") || variables.has("I_MPI_HYDRA_UUID");
  auto environment = read_ranks(
      variables, kPmi, is_intel ? Launcher::kIntelMpi : Launcher::kMpich);
  if (!environment.has_value() ||
      (slurm.has_value() && slurm->size == environment->size &&
       slurm->rank == environment->rank)) {
    return std::nullopt;
  }
  environment->job =
      join_texts(variables, {"LIBFSDP_JOB", "PMI_JOBID", "I_MPI_HYDRA_UUID"});
  return environment;
}

/// Two launchers of processes that are both at work can not both be right. One
/// that has started a single process may be around the other.
void check_conflict(
    const std::optional<Environment>& chosen,
    const std::optional<Environment>& other) {
  if (!chosen || !other || other->size == 1 ||
      (other->size == chosen->size && other->rank == chosen->rank)) {
    return;
  }
  const auto describe = [](const Environment& environment) {
    return name_of(environment.launcher) + " (" + environment.rank_variable +
        ") says rank " + std::to_string(environment.rank) + "/" +
        std::to_string(environment.size);
  };
  throw std::invalid_argument(
      "fsdp: the environment speaks of two jobs: " + describe(*chosen) +
      ", but " + describe(*other) +
      ". Unset the variables of one of them, or set RANK and WORLD_SIZE.");
}

Environment read_launcher(const Variables& variables) {
  if (auto plain = read_plain(variables)) {
    return *std::move(plain);
  }
  auto slurm = read_slurm(variables);
  auto pmi = read_pmi(variables, slurm);
  if (auto open_mpi = read_open_mpi(variables)) {
    check_conflict(open_mpi, pmi);
    return *std::move(open_mpi);
  }
  if (pmi.has_value()) {
    return *std::move(pmi);
  }
  if (slurm.has_value()) {
    return *std::move(slurm);
  }
  if (variables.has("PMIX_RANK")) {
    throw std::invalid_argument(
        "fsdp: environment variable " + quoted(variables, "PMIX_RANK") +
        " is set, but nothing says how many ranks there are. Set RANK to its"
        " value and WORLD_SIZE to their number.");
  }
  Environment alone;
  alone.note = unused_slurm_tasks(variables);
  return alone;
}

/// WORLD_SIZE without RANK, as batch scripts like to set it.
void check_world_size(
    const Variables& variables,
    const Environment& environment) {
  const auto size = variables.number(kPlain.size, 1, kMostRanks);
  if (!size.has_value() || *size == environment.size) {
    return;
  }
  if (environment.launcher == Launcher::kNone) {
    refuse_without(variables, kPlain.size, kPlain.rank);
  }
  throw std::invalid_argument(
      "fsdp: environment variable " + quoted(variables, kPlain.size) +
      " is set without RANK, but " + name_of(environment.launcher) +
      " has started " + std::to_string(environment.size) +
      " processes. Unset it, or start as many.");
}

/// MASTER_ADDR and MASTER_PORT win over what Slurm says.
void read_master(const Variables& variables, Environment& environment) {
  const auto host = variables.text("MASTER_ADDR");
  const auto port = variables.number("MASTER_PORT", 1, 65535);
  if (!host && !port) {
    return;
  }
  StoreAddress store = environment.store.value_or(StoreAddress());
  if (port.has_value()) {
    store.port = static_cast<int>(*port);
  }
  if (host.has_value()) {
    store.host = *host;
  } else if (environment.on_one_host() && store.host.empty()) {
    store.host = "127.0.0.1";
  }
  if (store.port == 0) {
    refuse_without(variables, "MASTER_ADDR", "MASTER_PORT");
  }
  if (store.host.empty()) {
    refuse_without(variables, "MASTER_PORT", "MASTER_ADDR");
  }
  environment.store = store;
}

} // namespace

std::string name_of(Launcher launcher) {
  switch (launcher) {
    case Launcher::kNone:
      return "nobody";
    case Launcher::kVariables:
      return "RANK and WORLD_SIZE";
    case Launcher::kFsdpRun:
      return "fsdp run";
    case Launcher::kTorchrun:
      return "torchrun";
    case Launcher::kOpenMpi:
      return "Open MPI";
    case Launcher::kMpich:
      return "MPICH";
    case Launcher::kIntelMpi:
      return "Intel MPI";
    case Launcher::kSlurm:
      return "Slurm";
  }
  return {};
}

Environment read_environment(const GetVariable& get) {
  const Variables variables(get);
  auto environment = read_launcher(variables);
  check_world_size(variables, environment);
  if (environment.size > 1) {
    read_master(variables, environment);
    if (auto store = read_settings(get).store) {
      environment.store = std::move(store);
      environment.store_is_served = false;
    }
  }
  return environment;
}

std::string missing_store_text(const Environment& environment) {
  return "this job has " + std::to_string(environment.size) +
      " ranks (started by " + name_of(environment.launcher) +
      "), but nothing says where they find each other. Set MASTER_ADDR to"
      " the host of rank 0 and MASTER_PORT to a free port there, the same on"
      " all ranks (Open MPI: mpirun -x MASTER_ADDR=... -x MASTER_PORT=...;"
      " MPICH: mpirun -genv MASTER_ADDR ... -genv MASTER_PORT ...), or set"
      " LIBFSDP_STORE to file:///PATH, a new file that all hosts see.";
}

} // namespace fsdp::detail
