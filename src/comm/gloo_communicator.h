#pragma once

#include <fsdp/communicator.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <memory>

namespace fsdp::detail {

enum class GlooInterface : uint8_t {
  /// That of GLOO_SOCKET_IFNAME (several, separated by commas, share the work),
  /// or else the one that the host's name resolves to.
  kDefault,
  /// For ranks that are all on one host; GLOO_SOCKET_IFNAME goes first.
  kLoopback,
};

enum class CompareCalls : uint8_t { kNo, kYes };

/// The communicator of one rank over Gloo. `store` is the same for all ranks,
/// and must serve while the communicators live. Collective: waits until all
/// ranks have come; throws CommunicationError, which names those that have not.
///
/// With CompareCalls::kYes every call is compared with those of the other ranks
/// before it runs, by a small gather; without it ranks that call different
/// things are told so after about a second.
std::shared_ptr<Communicator> make_gloo_communicator(
    c10::intrusive_ptr<c10d::Store> store,
    int rank,
    int size,
    std::chrono::milliseconds timeout,
    GlooInterface interface = GlooInterface::kDefault,
    CompareCalls compare_calls = CompareCalls::kNo);

} // namespace fsdp::detail
