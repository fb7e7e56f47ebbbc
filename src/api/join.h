#pragma once

#include "launch/environment.h"
#include "launch/settings.h"

#include <fsdp/communicator.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::detail {

/// What init() has read.
struct StartUp {
  Environment environment;
  std::optional<Backend> backend; // not set: what suits
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  bool debug = false;   // extra checks
  uint64_t attempt = 0; // calls of init() before this one
};

/// This process in its job.
struct Joined {
  std::shared_ptr<Communicator> communicator;
  Backend backend = Backend::kSingle;
  std::vector<std::string> hosts; // by rank
  std::string store;              // where it is; empty: none was opened
  /// Why the ranks do not use shared memory although they are on one host;
  /// empty otherwise.
  std::string no_shm;
};

/// Finds the other ranks and makes a communicator of all. Throws
/// CommunicationError, and std::invalid_argument where the start-up variables
/// do not allow it. Collective.
Joined join(const StartUp& start);

} // namespace fsdp::detail
