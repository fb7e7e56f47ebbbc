#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::detail {

using C10dBackendPtr = c10::intrusive_ptr<c10d::Backend>;
using C10dStorePtr = c10::intrusive_ptr<c10d::Store>;

/// Connects to the other ranks of a group that call it with the same store.
using C10dBackendFactory = std::function<
    C10dBackendPtr(const C10dStorePtr& store, int rank, int size)>;

/// What a back end of our own can do beyond c10d::Backend.
class TaggedBackend {
 public:
  virtual ~TaggedBackend() = default;

  /// The next collective of this rank meets only those with the same tag, so
  /// that two different calls can not take each other's bytes.
  virtual void set_next_tag(uint32_t tag) = 0;

  /// Ends all calls in flight, here and on the peers, with an error. It can not
  /// be used afterwards.
  virtual void break_connections() = 0;

  /// The ranks to which the connection is lost.
  virtual std::vector<int> lost_ranks() = 0;
};

/// Ends all calls in flight where that is possible. Throws nothing.
void break_backend(c10d::Backend& backend);

inline constexpr std::chrono::milliseconds kNoLimit =
    std::chrono::milliseconds::max();

/// A limit for a back end's own waits that ends after ours: our message is the
/// better one. Capped, because clocks overflow.
std::chrono::milliseconds longer_than(std::chrono::milliseconds timeout);

/// The text of an exception of libtorch or Gloo, without its stack trace.
std::string c10d_text_of(const std::exception_ptr& error);
std::string c10d_text_of(const std::exception& error);

} // namespace fsdp::detail
