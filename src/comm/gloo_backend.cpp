#include "comm/gloo_backend.h"

#include "comm/gloo_sockets.h"
#include "comm/sigpipe_block.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <utility>

namespace fsdp::detail {
namespace {

using GlooDevices = std::vector<std::shared_ptr<::gloo::transport::Device>>;

// All ranks are there when a back end is made, so that they connect at once.
constexpr std::chrono::milliseconds kConnectLimit = std::chrono::seconds(30);

class GlooBackend : public c10d::ProcessGroupGloo, public TaggedBackend {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  /// Gloo terminates the process when a message is longer than its receiver
  /// expects, and does not notice when it is shorter. Messages are matched by
  /// this counter, so setting it keeps different calls apart.
  void set_next_tag(uint32_t tag) override { collectiveCounter_ = tag; }

  /// Gloo has no call for it, but a wait that is too long ends everything else
  /// that its context waits for, and closes the connections.
  void break_connections() override {
    for (size_t context = 0; context < contexts_.size(); ++context) {
      for (int peer = 0; peer < size_; ++peer) {
        const auto receive =
            peer == rank_ ? nullptr : try_receive(peer, context);
        if (receive != nullptr) {
          let_time_out(*receive);
          break; // that was for all peers
        }
      }
    }
  }

  std::vector<int> lost_ranks() override {
    std::vector<int> lost;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && try_receive(peer, 0) == nullptr) {
        lost.push_back(peer);
      }
    }
    return lost;
  }

 private:
  /// Null where the connection to `peer` is broken.
  c10::intrusive_ptr<c10d::Work> try_receive(int peer, size_t context) {
    const SigpipeBlock block;
    try {
      std::vector<at::Tensor> nothing = {at::empty({1}, at::kByte)};
      return recv(nothing, peer, static_cast<int>(context));
    } catch (const std::exception&) {
      return nullptr;
    }
  }

  static void let_time_out(c10d::Work& receive) {
    try {
      receive.wait(std::chrono::milliseconds(1));
    } catch (const std::exception&) {
      // That is what it is for.
    }
  }
};

GlooDevices make_gloo_devices(GlooInterface interface) {
  constexpr bool kConnectLazily = false; // a lazy device can not be shared
  using Gloo = c10d::ProcessGroupGloo;
  GlooDevices devices;
  const char* const names = std::getenv("GLOO_SOCKET_IFNAME");
  std::istringstream list(names == nullptr ? "" : names);
  for (std::string name; std::getline(list, name, ',');) {
    devices.push_back(Gloo::createDeviceForInterface(name, kConnectLazily));
  }
  if (devices.empty()) {
    devices.push_back(
        interface == GlooInterface::kLoopback
            ? Gloo::createDeviceForHostname("127.0.0.1", kConnectLazily)
            : Gloo::createDefaultDevice(kConnectLazily));
  }
  return devices;
}

// Gloo writes without MSG_NOSIGNAL, from its own threads (seen in 2.13.0).
GlooDevices gloo_devices(GlooInterface interface) {
  const SigpipeBlock block;
  const PrivateSockets sockets;
  try {
    return make_gloo_devices(interface);
  } catch (...) {
    throw CommunicationError(
        "gloo: no network interface could be opened: " +
        c10d_text_of(std::current_exception()) +
        ". Name one of this host in GLOO_SOCKET_IFNAME.");
  }
}

} // namespace

C10dBackendFactory gloo_factory(
    std::chrono::milliseconds timeout,
    GlooInterface interface) {
  return [devices = gloo_devices(interface), timeout](
             const C10dStorePtr& store, int rank, int size) -> C10dBackendPtr {
    const SigpipeBlock block;
    const PrivateSockets sockets;
    const auto options = c10d::ProcessGroupGloo::Options::create(
        std::min(timeout, kConnectLimit));
    options->devices = devices;
    auto backend = c10::make_intrusive<GlooBackend>(store, rank, size, options);
    // Calls have limits of their own; the one that watches for deaths has none.
    backend->setTimeout(longer_than(kNoLimit));
    return backend;
  };
}

} // namespace fsdp::detail
