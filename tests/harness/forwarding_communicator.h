#pragma once

#include <fsdp/communicator.h>
#include <fsdp/world.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::testing {

/// Passes every call on to another communicator, but for what a derived class
/// does by itself. It has no shared slices: nets gather by collectives.
class ForwardingCommunicator : public Communicator {
 public:
  /// The communicator of a world, which it keeps alive.
  explicit ForwardingCommunicator(World world) : world_(std::move(world)) {}
  explicit ForwardingCommunicator(std::shared_ptr<Communicator> inner)
      : inner_(std::move(inner)) {}

  int rank() const override { return inner().rank(); }
  int size() const override { return inner().size(); }
  std::chrono::milliseconds timeout() const override {
    return inner().timeout();
  }
  std::unique_ptr<Work> all_gather(
      std::span<std::byte> buffer,
      std::string what) override {
    return called(what).all_gather(buffer, std::move(what));
  }
  std::unique_ptr<Work> reduce_scatter(
      std::span<const std::byte> input,
      std::span<std::byte> output,
      DType dtype,
      std::span<const int64_t> cuts,
      std::string what,
      ReduceOp op) override {
    return called(what).reduce_scatter(
        input, output, dtype, cuts, std::move(what), op);
  }
  std::unique_ptr<Work> all_reduce(
      std::span<std::byte> buffer,
      DType dtype,
      ReduceOp op,
      std::string what) override {
    return called(what).all_reduce(buffer, dtype, op, std::move(what));
  }
  std::unique_ptr<Work>
  broadcast(std::span<std::byte> buffer, int root, std::string what) override {
    return called(what).broadcast(buffer, root, std::move(what));
  }
  void barrier(std::string what) override {
    called(what).barrier(std::move(what));
  }
  std::vector<std::string> exchange(std::string_view mine, std::string what)
      override {
    return called(what).exchange(mine, std::move(what));
  }
  uint64_t epoch() const override { return inner().epoch(); }
  void signal_failure(std::string_view message) override {
    inner().signal_failure(message);
  }
  std::shared_ptr<Communicator> split(int color, int key) override {
    return std::make_shared<ForwardingCommunicator>(inner().split(color, key));
  }
  std::string aborted() const override { return inner().aborted(); }
  void reserve(int64_t bytes) override { inner().reserve(bytes); }

 protected:
  /// Makes the collective `what`, of those that move data.
  virtual Communicator& called(const std::string& what) {
    static_cast<void>(what);
    return inner();
  }

  Communicator& inner() const {
    return inner_ != nullptr ? *inner_ : world_.communicator();
  }

 private:
  World world_;
  std::shared_ptr<Communicator> inner_; // null: that of `world_`
};

/// `world`, where nets gather by collectives although ranks may have memory in
/// common.
inline World gathering_world(const World& world) {
  return World(std::make_shared<ForwardingCommunicator>(world));
}

} // namespace fsdp::testing
