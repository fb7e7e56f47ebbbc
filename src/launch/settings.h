#pragma once

#include "launch/log.h"
#include "launch/variables.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace fsdp::detail {

enum class Backend : uint8_t { kSingle, kShm, kGloo };

/// "shm", "gloo" or "single", and back. Throws std::invalid_argument for
/// another name; `who` says where it comes from.
Backend parse_backend(const std::string& name, const std::string& who);
std::string name_of(Backend backend);

/// Where the ranks of several hosts find each other: a TCP port that rank 0
/// opens, or a file on a file system that all hosts see.
struct StoreAddress {
  std::string path; // of the file; empty: TCP
  std::string host;
  int port = 0;

  std::string text() const; // "tcp://host:port", "file:///path"
};

/// What the LIBFSDP_ variables say.
struct Settings {
  std::optional<Backend> backend;
  std::optional<std::chrono::milliseconds> timeout;
  /// "full_shard", "shard_grad_op", "shard_optimizer", "no_shard",
  /// "hybrid_shard" or "hybrid_shard_grad_op".
  std::optional<std::string> strategy;
  std::optional<StoreAddress> store;
  LogLevel log = LogLevel::kOff;
  bool debug = false; // extra checks in the back ends
};

/// Throws std::invalid_argument that names the variable and its value.
Settings read_settings(const GetVariable& get);

} // namespace fsdp::detail
