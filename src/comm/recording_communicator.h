#pragma once

#include "comm/epoch_counter.h"

#include <fsdp/communicator.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::detail {

/// A rank of a world of any size without its peers: calls are recorded and
/// complete at once. all_gather leaves the other slices as they are, reductions
/// and broadcasts return what this rank put in, exchange returns this rank's
/// bytes size() times.
///
/// A line per call: "all_gather unit 'b' 64 bytes", with the name of the
/// collective only once where `what` begins with it; for a reduction also
/// "float32" and "sum", for a broadcast "root 0". Also "split color 0 key 1"
/// and "signal_failure message".
class RecordingCommunicator : public Communicator {
 public:
  RecordingCommunicator(int rank, int size);

  const std::vector<std::string>& lines() const { return *lines_; }

  /// Forgets the lines so far.
  void clear() { lines_->clear(); }

  int rank() const override { return rank_; }

  int size() const override { return size_; }

  /// 0: nothing ever waits.
  std::chrono::milliseconds timeout() const override {
    return std::chrono::milliseconds(0);
  }

  std::unique_ptr<Work> all_gather(
      std::span<std::byte> buffer,
      std::string what) override;

  std::unique_ptr<Work> reduce_scatter(
      std::span<const std::byte> input,
      std::span<std::byte> output,
      DType dtype,
      std::span<const int64_t> cuts,
      std::string what,
      ReduceOp op) override;

  std::unique_ptr<Work> all_reduce(
      std::span<std::byte> buffer,
      DType dtype,
      ReduceOp op,
      std::string what) override;

  std::unique_ptr<Work>
  broadcast(std::span<std::byte> buffer, int root, std::string what) override;

  void barrier(std::string what) override;

  std::vector<std::string> exchange(std::string_view mine, std::string what)
      override;

  uint64_t epoch() const override { return epoch_->value(); }

  void signal_failure(std::string_view message) override;

  /// Sets the rank and size of the communicator that the next split() returns.
  /// Without it they are this communicator's own, as if all ranks had passed
  /// the same color and key.
  void set_next_split(int rank, int size);

  /// The child writes to the same lines, each led by "color 0: ".
  std::shared_ptr<Communicator> split(int color, int key) override;

 private:
  void record(const std::string& line);

  int rank_;
  int size_;
  std::shared_ptr<EpochCounter> epoch_ = std::make_shared<EpochCounter>();
  std::pair<int, int> next_split_; // rank, size
  std::string prefix_;
  std::shared_ptr<std::vector<std::string>> lines_;
};

} // namespace fsdp::detail
