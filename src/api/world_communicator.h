#pragma once

#include <fsdp/communicator.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::detail {

class WorldCommunicator;

/// The communicators that end with a world: its own, those of its nets, and
/// those of the worlds that were split from it.
class WorldMembers {
 public:
  explicit WorldMembers(std::shared_ptr<WorldMembers> parent = nullptr);

  void add(const std::shared_ptr<WorldCommunicator>& communicator);

  /// They let go of what they wrap, and throw from now on.
  void end();

 private:
  std::shared_ptr<WorldMembers> parent_;
  std::mutex mutex_; // guards communicators_
  std::vector<std::weak_ptr<WorldCommunicator>> communicators_;
};

/// Passes all calls on until its world has ended; then they throw
/// CommunicationError. What it splits belongs to the same world.
class WorldCommunicator final : public Communicator {
 public:
  /// Adds the new one to `members`.
  static std::shared_ptr<WorldCommunicator> make(
      std::shared_ptr<Communicator> inner,
      std::shared_ptr<WorldMembers> members);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::chrono::milliseconds timeout() const override { return timeout_; }

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
  std::unique_ptr<Work> reduce_scatter_pieces(
      std::vector<Piece> input,
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
  std::unique_ptr<Work> all_reduce_pieces(
      std::vector<Piece> input,
      std::span<std::byte> output,
      DType dtype,
      ReduceOp op,
      std::string what) override;
  std::unique_ptr<Work>
  broadcast(std::span<std::byte> buffer, int root, std::string what) override;
  void barrier(std::string what) override;
  std::vector<std::string> exchange(std::string_view mine, std::string what)
      override;

  uint64_t epoch() const override;
  void signal_failure(std::string_view message) override;
  std::shared_ptr<Communicator> split(int color, int key) override;
  std::string aborted() const override;
  void reserve(int64_t bytes) override;
  std::shared_ptr<SharedSlices> share_slices(
      std::span<const int64_t> slice_bytes) override;

  /// Like split(), for a world of its own: what is split from the result ends
  /// with `members`, which are to be children of this one's.
  std::shared_ptr<WorldCommunicator>
  split_world(int color, int key, std::shared_ptr<WorldMembers> members);

  const std::shared_ptr<WorldMembers>& members() const { return members_; }

  bool has_ended() const { return inner_ == nullptr; }
  std::string ended_text(const std::string& what) const;

 private:
  friend class WorldMembers;

  WorldCommunicator(
      std::shared_ptr<Communicator> inner,
      std::shared_ptr<WorldMembers> members);
  /// What is wrapped. Throws CommunicationError when the world has ended.
  Communicator& open(const std::string& what) const;
  void let_go();

  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<WorldMembers> members_;
  std::shared_ptr<Communicator> inner_; // null once the world has ended
  uint64_t last_epoch_ = 0;             // when it ended
};

} // namespace fsdp::detail
