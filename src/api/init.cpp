#include <fsdp/init.h>

#include "api/join.h"
#include "api/world_state.h"
#include "launch/environment.h"
#include "launch/settings.h"
#include "runtime/errors.h"

#include <fsdp/version.h>

#include <torch/version.h>

#include <unistd.h>

#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <utility>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace fsdp {

namespace {

using detail::Backend;
using detail::Joined;
using detail::StartUp;
using detail::WorldState;

constexpr std::chrono::minutes kDefaultTimeout(10);

/// The world of this process, of which there is one at a time.
class WorldOfProcess {
 public:
  static WorldOfProcess& instance() {
    static WorldOfProcess instance;
    return instance;
  }

  World make(const InitOptions& options);

 private:
  std::mutex mutex_; // guards all below
  uint64_t attempts_ = 0;
  std::weak_ptr<WorldState> current_;
};

StartUp start_up(
    const InitOptions& options,
    const detail::Settings& settings,
    uint64_t attempt) {
  StartUp start;
  start.environment = detail::read_environment(detail::process_environment());
  start.attempt = attempt;
  start.debug = settings.debug;
  start.backend = options.backend.has_value()
      ? detail::parse_backend(*options.backend, "InitOptions::backend")
      : settings.backend;
  start.timeout =
      options.timeout.value_or(settings.timeout.value_or(kDefaultTimeout));
  if (start.timeout.count() <= 0) {
    throw std::invalid_argument(
        "fsdp: InitOptions::timeout must be positive, but is " +
        std::to_string(start.timeout.count()) + " ms.");
  }
  return start;
}

/// The launcher's numbers where it gives them: programs choose devices by them.
detail::Placement placement_of(
    const detail::Environment& environment,
    const Joined& joined) {
  auto placement = detail::place_among(joined.hosts, environment.rank);
  if (environment.local_rank.has_value()) {
    placement.local_rank = *environment.local_rank;
    placement.local_size = *environment.local_size;
  }
  return placement;
}

std::string count_of(size_t count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

void log_start(
    const detail::Log& log,
    const StartUp& start,
    const Joined& joined,
    const detail::Settings& settings) {
  const std::set<std::string> hosts(joined.hosts.begin(), joined.hosts.end());
  std::ostringstream job;
  job << count_of(joined.hosts.size(), "rank") << " on "
      << count_of(hosts.size(), "host") << ", started by "
      << name_of(start.environment.launcher) << "; back end "
      << name_of(joined.backend) << "; store "
      << (joined.store.empty() ? "none" : joined.store) << "; time limit "
      << static_cast<double>(start.timeout.count()) / 1000.0
      << " s; extra checks " << (settings.debug ? "on" : "off") << "; libfsdp "
      << version() << ", torch " << TORCH_VERSION;
  log.info(job.str());
  std::ostringstream mine;
  mine << "pid " << ::getpid() << " on "
       << joined.hosts.at(static_cast<size_t>(start.environment.rank));
  log.debug(mine.str());
}

/// Blocks of their own are unmapped when they are freed, and the top of the
/// heap is given back; other C libraries have no such settings.
void keep_freed_memory() {
#if defined(__GLIBC__)
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, -1);
#endif
}

World WorldOfProcess::make(const InitOptions& options) {
  const std::lock_guard lock(mutex_);
  if (const auto state = current_.lock()) {
    TORCH_CHECK_VALUE(
        state->communicator().has_ended(),
        "fsdp::init: this process has a world already (",
        detail::rank_text(
            state->communicator().rank(), state->communicator().size()),
        "). Hand that World on, copies refer to one group, or call its"
        " shutdown() first.");
  }
  const auto settings = detail::read_settings(detail::process_environment());
  const auto start = start_up(options, settings, attempts_++);
  const auto& environment = start.environment;
  if (!environment.note.empty()) {
    TORCH_WARN("fsdp: ", environment.note);
  }
  const auto joined = detail::join(start);
  if (!joined.no_shm.empty() && environment.rank == 0) {
    TORCH_WARN(
        "fsdp: the ranks use Gloo, since shared memory could not be set up: ",
        joined.no_shm);
  }
  const detail::Log log(settings.log, environment.rank, environment.size);
  log_start(log, start, joined, settings);
  auto world = WorldState::make_world(
      joined.communicator, placement_of(environment, joined), log);
  current_ = WorldState::of(world);
  return world;
}

} // namespace

World init(const InitOptions& options) {
  if (options.keep_freed_memory) {
    keep_freed_memory();
  }
  try {
    return detail::communicate(
        [&] { return WorldOfProcess::instance().make(options); });
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

} // namespace fsdp
