#pragma once

#include <fsdp/export.h>
#include <fsdp/world.h>

#include <chrono>
#include <optional>
#include <string>

namespace fsdp {

/// How a process joins its job. What is not set here is taken from the
/// environment: see docs/launch.md.
struct InitOptions {
  /// "shm" (ranks of one host), "gloo" (any), or "single". Not set:
  /// LIBFSDP_BACKEND, or else shm where all ranks are on one host, else gloo.
  std::optional<std::string> backend = std::nullopt;
  /// The longest wait for a peer. Not set: LIBFSDP_TIMEOUT (seconds), or else
  /// ten minutes.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;
  /// Let the allocator of this process (glibc's) keep the memory of tensors
  /// that are gone. By default it gives blocks above 32 MB back to the system
  /// at once, and taking them again costs more than computing their contents.
  /// Holds for the whole process and for good; the memory of a step is then
  /// not seen by other processes between steps.
  bool keep_freed_memory = false;
};

/// The world of this job. Its ranks are the processes that torchrun, mpirun,
/// srun or `fsdp run` has started, as the environment tells; a program that was
/// started alone is a world of one.
///
/// A second call throws c10::ValueError while the world of the first is in use;
/// after World::shutdown() it makes a new one. Called by one thread at a time.
///
/// Collective: all processes of the job. Throws c10::ValueError for an
/// environment that cannot be right, c10::DistBackendError when ranks do not
/// come in time (it names them).
FSDP_API World init(const InitOptions& options = {});

} // namespace fsdp
