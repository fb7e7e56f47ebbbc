#pragma once

#include <fsdp/export.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace fsdp {

/// Element type of a reduction. Gathers, broadcasts and exchanges move bytes.
enum class DType : uint8_t {
  kFloat32,
  kFloat64,
  kFloat16,
  kBFloat16,
  kInt32,
  kInt64,
};

/// Bytes of one element of `dtype`.
FSDP_API int64_t size_of(DType dtype);

/// kMean: the sum divided by the number of ranks; floating point only.
enum class ReduceOp : uint8_t { kSum, kMax, kMean };

/// Thrown when a peer failed, died or did not arrive in time. The layers that
/// know libtorch turn it into c10::DistBackendError with the same text.
class FSDP_API CommunicationError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Part of a buffer that does not lie in one place.
struct Piece {
  int64_t offset = 0; // in the buffer, in bytes
  std::span<const std::byte> bytes;
};

/// A collective in flight.
class FSDP_API Work {
 public:
  virtual ~Work() = default;

  /// Whether wait() would return (or throw) without waiting for a peer.
  virtual bool ready() = 0;

  /// Waits until the result is in this rank's buffers. Throws
  /// CommunicationError when the time limit of the communicator is over (the
  /// text names the collective, this rank and the ranks that are missing), when
  /// a peer signalled a failure, or when a peer's call differs from this one.
  virtual void wait() = 0;
};

/// Memory that all ranks of a group see. It is divided into buffers, and each
/// buffer into one slice per rank: a rank writes its own slices and reads all,
/// so that gathering them copies nothing.
///
/// Writers and readers are kept apart by two counts per rank. Before it reads,
/// a rank waits until all have published as often as itself; before it writes
/// again, until all have retired what they read. Only the two await functions
/// wait, and throw CommunicationError, also when a peer fails meanwhile. They
/// are no calls of the communicator.
class FSDP_API SharedSlices {
 public:
  virtual ~SharedSlices() = default;

  /// This rank's slice of a buffer.
  virtual std::span<std::byte> own(size_t buffer) = 0;

  /// All slices of a buffer, by rank, in memory that faults when written.
  virtual std::span<const std::byte> whole(size_t buffer) = 0;

  /// This rank's slices are written, and stay as they are until all retire.
  virtual void publish() = 0;
  virtual void await_published(const std::string& what) = 0;

  /// This rank reads no more of what was published.
  virtual void retire() = 0;
  virtual void await_retired(const std::string& what) = 0;
};

/// A group of ranks and the collectives that run over it: bytes, element types
/// and operations only, so that it can be used and tested without libtorch.
///
/// Collective: every method but rank(), size(), timeout(), epoch(), aborted()
/// and signal_failure().
/// All ranks of the group call them in the same order with the same `what`,
/// sizes and types; a difference is an error on all ranks, never a mix-up.
///
/// `what` names the call in errors, for instance "all_gather of unit
/// 'layers.3'". Buffers stay valid, and inputs unchanged, until wait() has
/// returned or the handle is destroyed. A communicator is used by one thread at
/// a time.
class FSDP_API Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// The longest that a wait may take.
  virtual std::chrono::milliseconds timeout() const = 0;

  /// Gathers equal slices in place: `buffer` holds size() slices of equal
  /// length; slice rank() is this rank's input, the others are filled.
  virtual std::unique_ptr<Work> all_gather(
      std::span<std::byte> buffer,
      std::string what) = 0;

  /// Reduces `input` over the ranks and hands rank r the elements
  /// [cuts[r], cuts[r + 1]) in `output`. `cuts` holds size() + 1 non-decreasing
  /// element offsets, the same on all ranks, from 0 to the number of elements
  /// of `input`. 16-bit types are reduced in float32 and rounded once. Back
  /// ends with a fixed order sum in rank order, so that results do not vary.
  virtual std::unique_ptr<Work> reduce_scatter(
      std::span<const std::byte> input,
      std::span<std::byte> output,
      DType dtype,
      std::span<const int64_t> cuts,
      std::string what,
      ReduceOp op = ReduceOp::kSum) = 0;

  /// The same for an input in pieces: in ascending order, of whole elements,
  /// none over another. What no piece covers counts as zeros. Back ends that
  /// can read pieces where they lie spare a copy.
  virtual std::unique_ptr<Work> reduce_scatter_pieces(
      std::vector<Piece> input,
      std::span<std::byte> output,
      DType dtype,
      std::span<const int64_t> cuts,
      std::string what,
      ReduceOp op = ReduceOp::kSum);

  /// Reduces `buffer` over the ranks, in place; the same bits on all ranks.
  virtual std::unique_ptr<Work> all_reduce(
      std::span<std::byte> buffer,
      DType dtype,
      ReduceOp op,
      std::string what) = 0;

  /// The same for an input in pieces; `output` is as long as the buffer. Pieces
  /// may lie in `output`, each in its place.
  virtual std::unique_ptr<Work> all_reduce_pieces(
      std::vector<Piece> input,
      std::span<std::byte> output,
      DType dtype,
      ReduceOp op,
      std::string what);

  /// Copies `buffer` of rank `root` to all ranks.
  virtual std::unique_ptr<Work>
  broadcast(std::span<std::byte> buffer, int root, std::string what) = 0;

  virtual void barrier(std::string what) = 0;

  /// Hands every rank the bytes of all ranks, by rank. Lengths may differ.
  virtual std::vector<std::string> exchange(
      std::string_view mine,
      std::string what) = 0;

  /// Counts the steps that failed. A new communicator is in epoch 0.
  virtual uint64_t epoch() const = 0;

  /// Ends the step of this rank: each peer throws CommunicationError with
  /// `message` once, at the first call in epoch() that this rank has not made;
  /// calls that it has made still become complete. This rank, and each peer as
  /// it throws, goes on to the next epoch with nothing in flight, so that all
  /// ranks meet again in their next step; waiting for a handle of an ended
  /// epoch throws. Never waits.
  ///
  /// The same happens, with the same `message`, in all communicators that were
  /// split from this one, each in its own epoch and by its own calls, and in
  /// those split from them; never in the communicator that this one was split
  /// from. In all of them peers get "rank 1/4 failed: message", which names
  /// this rank as this communicator numbers it.
  virtual void signal_failure(std::string_view message) = 0;

  /// A communicator over the ranks that pass the same `color`, ordered by
  /// (`key`, rank). Collective over this communicator.
  virtual std::shared_ptr<Communicator> split(int color, int key) = 0;

  /// Why no call will succeed any more: a peer died or a wait was too long.
  /// Empty while all is well. Never waits. Back ends whose ranks are threads go
  /// on after a time-out, and are never aborted.
  virtual std::string aborted() const { return {}; }

  /// Takes the memory now that calls with up to `bytes` bytes per rank need, so
  /// that none of them fails for lack of it. Throws CommunicationError.
  /// Collective.
  virtual void reserve(int64_t bytes) { static_cast<void>(bytes); }

  /// Memory of which this rank owns `slice_bytes[i]` bytes of buffer i, zeros
  /// at first, or null where the ranks have no memory in common. It may outlive
  /// the communicator. Collective; `slice_bytes` is the same on all ranks.
  virtual std::shared_ptr<SharedSlices> share_slices(
      std::span<const int64_t> slice_bytes) {
    static_cast<void>(slice_bytes);
    return nullptr;
  }
};

} // namespace fsdp
