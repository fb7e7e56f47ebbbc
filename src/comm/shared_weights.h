#pragma once

#include <fsdp/communicator.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace fsdp::detail {

/// Keeps those who write and those who read apart, where ranks see each other's
/// weights in memory that they share.
///
/// [Note: Generations] Weights alternate between being written and being read.
/// A rank publishes its slices when it opens a region, and reads once all have
/// published as often. It retires when the region closes in which gradients
/// were settled, and writes once all have retired as often: that the last
/// reduction is complete does not say that a peer reads no more. Passes without
/// a settlement stay in one generation, so ranks may evaluate, or accumulate
/// with no_sync, a different number of times. A region that failed stays in its
/// generation too, unless its gradients were settled already. Since all ranks
/// settle the same passes, they retire from the same generations. Whatever is
/// published after a settlement is one generation: between backward and the
/// optimizer's step either all ranks evaluate, or none.
class SharedWeights {
 public:
  explicit SharedWeights(std::shared_ptr<SharedSlices> slices);

  const std::shared_ptr<SharedSlices>& slices() const { return slices_; }

  bool is_writable() const { return state_ == State::kWritable; }
  bool is_published() const { return state_ == State::kPublished; }

  /// Waits until this rank may write: at once after a settlement, else until
  /// all ranks wait here, too. Throws CommunicationError.
  void await_writable(const std::string& what);

  /// What was written may be read. Must be writable.
  void publish();

  /// Waits until the slices of all ranks may be read. A read is no call: a peer
  /// that has failed may have done so at a later place. Throws
  /// CommunicationError.
  void await_readable(const std::string& what);

  /// This rank reads no more of this generation.
  void retire();

 private:
  enum class State : uint8_t {
    kWritable,
    kPublished, // by this rank; read once all have
    kRetired,   // by this rank; written once all have
  };

  std::shared_ptr<SharedSlices> slices_;
  State state_ = State::kWritable;
};

} // namespace fsdp::detail
