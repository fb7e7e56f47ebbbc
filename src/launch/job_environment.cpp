#include "launch/job_environment.h"

#include <unistd.h>

#include <chrono>
#include <map>
#include <random>
#include <sstream>
#include <string_view>

namespace fsdp::detail {
namespace {

using Variables = std::map<std::string, std::string>;

Variables parse(const std::vector<std::string>& environment) {
  Variables variables;
  for (const std::string& entry : environment) {
    // A launcher around this one speaks of its own job.
    if (!entry.starts_with("TORCHELASTIC_")) {
      const size_t split = entry.find('=');
      const size_t value = split == std::string::npos ? split : split + 1;
      variables.emplace(
          entry.substr(0, split),
          value == std::string::npos ? "" : entry.substr(value));
    }
  }
  return variables;
}

void set_threads(Variables& variables, const JobEnvironment& job) {
  const std::string name = "OMP_NUM_THREADS";
  if (job.threads) {
    variables[name] = std::to_string(*job.threads);
  } else {
    variables.emplace(name, std::to_string(job.default_threads));
  }
}

} // namespace

std::vector<std::string> rank_environment(
    const std::vector<std::string>& inherited,
    const JobEnvironment& job,
    int rank) {
  Variables variables = parse(inherited);
  variables["RANK"] = std::to_string(rank);
  variables["LOCAL_RANK"] = std::to_string(rank);
  variables["WORLD_SIZE"] = std::to_string(job.ranks);
  variables["LOCAL_WORLD_SIZE"] = std::to_string(job.ranks);
  variables["GROUP_RANK"] = "0";
  variables["MASTER_ADDR"] = "127.0.0.1";
  variables["MASTER_PORT"] = std::to_string(job.master_port);
  variables["LIBFSDP_JOB"] = job.job;
  set_threads(variables, job);
  if (job.backend) {
    variables["LIBFSDP_BACKEND"] = *job.backend;
  }
  if (job.timeout_s) {
    variables["LIBFSDP_TIMEOUT"] = *job.timeout_s;
  }
  std::vector<std::string> result;
  for (const auto& [name, value] : variables) {
    result.push_back(name);
    result.back().append("=").append(value);
  }
  return result;
}

std::vector<std::string> own_environment() {
  std::vector<std::string> result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    result.emplace_back(*entry);
  }
  return result;
}

std::string new_job_name() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto time_us =
      std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  std::random_device random;
  std::ostringstream name;
  name << ::getpid() << '-' << time_us << '-' << std::hex << random();
  return name.str();
}

} // namespace fsdp::detail
