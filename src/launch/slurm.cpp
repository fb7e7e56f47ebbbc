#include "launch/slurm.h"

#include "launch/node_list.h"

#include <cstdint>
#include <vector>

namespace fsdp::detail {

namespace {

constexpr int64_t kMostTasks = int64_t{1} << 20;
constexpr int64_t kLargest = INT64_MAX;

// Numbers from here on are no steps of srun: the batch script, salloc's shell.
constexpr int64_t kFirstSpecialStep = 0xfffffff0;

/// The first of `names` that is set.
std::optional<std::string> first_set(
    const Variables& variables,
    const std::vector<std::string>& names) {
  for (const auto& name : names) {
    if (variables.has(name)) {
      return name;
    }
  }
  return std::nullopt;
}

/// The batch script, and the shell of salloc, have SLURM_PROCID=0 and the
/// number of tasks of the allocation too, but are one process. What srun starts
/// has a step.
bool is_task_of_srun(const Variables& variables) {
  const auto step = variables.number("SLURM_STEP_ID", 0, kLargest);
  return variables.has("SLURM_PROCID") && step.has_value() &&
      *step < kFirstSpecialStep;
}

void read_tasks(const Variables& variables, Environment& environment) {
  // SLURM_NTASKS may be that of the allocation.
  const auto size_name =
      first_set(variables, {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"});
  if (!size_name.has_value()) {
    variables.refuse(
        "SLURM_STEP_NUM_TASKS", "the number of tasks, as srun sets it");
  }
  const auto size = variables.number(*size_name, 1, kMostTasks);
  environment.size = static_cast<int>(size.value());
  environment.rank = static_cast<int>(
      variables.number("SLURM_PROCID", 0, environment.size - 1).value());
  environment.rank_variable = "SLURM_PROCID";
}

/// How many tasks run on the node of this process.
std::optional<int> tasks_here(const Variables& variables, int size) {
  const auto name = first_set(
      variables, {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"});
  if (!name.has_value()) {
    return std::nullopt;
  }
  const auto tasks = expand_task_list(*variables.text(*name));
  if (!tasks.has_value()) {
    variables.refuse(*name, "tasks per node, such as 2(x3),1");
  }
  const auto last = static_cast<int64_t>(tasks->size()) - 1;
  const auto node = variables.number("SLURM_NODEID", 0, last);
  if (last > 0 && !node.has_value()) {
    return std::nullopt;
  }
  const auto here = tasks->at(static_cast<size_t>(node.value_or(0)));
  if (here > size) {
    variables.refuse(*name, "at most " + std::to_string(size) + " in a node");
  }
  return here;
}

void read_place_on_node(const Variables& variables, Environment& environment) {
  const auto here = tasks_here(variables, environment.size);
  if (here.has_value() && variables.has("SLURM_LOCALID")) {
    environment.local_size = here;
    environment.local_rank =
        static_cast<int>(*variables.number("SLURM_LOCALID", 0, *here - 1));
  }
}

/// Rank 0 runs on the first node of the step.
void read_node_list(
    const Variables& variables,
    int64_t job,
    int64_t step,
    Environment& environment) {
  const auto name = first_set(
      variables,
      {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
  if (!name.has_value()) {
    return;
  }
  const auto nodes = expand_node_list(*variables.text(*name));
  if (!nodes.has_value()) {
    variables.refuse(*name, "a list of nodes, such as node[03-05,9],other");
  }
  StoreAddress store;
  store.host = environment.on_one_host() ? "127.0.0.1" : nodes->front();
  store.port = slurm_port(job, step);
  environment.store = store;
}

} // namespace

int slurm_port(int64_t job_id, int64_t step_id) {
  constexpr int64_t kFirst = 20000;
  constexpr int64_t kPorts = 10000;
  // Steps of one job may run at the same time on one node, and so may jobs.
  constexpr int64_t kStepDistance = 101;
  return static_cast<int>(
      kFirst + (job_id % kPorts + step_id % kPorts * kStepDistance) % kPorts);
}

std::optional<Environment> read_slurm(const Variables& variables) {
  if (!is_task_of_srun(variables)) {
    return std::nullopt;
  }
  Environment environment;
  environment.launcher = Launcher::kSlurm;
  read_tasks(variables, environment);
  read_place_on_node(variables, environment);
  const auto step = variables.number("SLURM_STEP_ID", 0, kLargest).value();
  const auto job = variables.number("SLURM_JOB_ID", 0, kLargest);
  if (job.has_value()) {
    environment.job = std::to_string(*job) + "." + std::to_string(step) + "." +
        variables.text("SLURM_RESTART_COUNT").value_or("0");
    read_node_list(variables, *job, step, environment);
  }
  return environment;
}

std::string unused_slurm_tasks(const Variables& variables) {
  const auto tasks = variables.number("SLURM_NTASKS", 0, kMostTasks);
  if (!variables.has("SLURM_JOB_ID") || tasks.value_or(1) <= 1) {
    return {};
  }
  return "the allocation of Slurm has SLURM_NTASKS=" + std::to_string(*tasks) +
      " tasks, but srun has not started this program, so it runs as one rank."
      " Start it with srun to use all of them.";
}

} // namespace fsdp::detail
