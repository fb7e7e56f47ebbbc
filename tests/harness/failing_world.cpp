#include "harness/failing_world.h"

#include "harness/forwarding_communicator.h"

#include <utility>

namespace fsdp::testing {

namespace {

using InjectionHandle = std::shared_ptr<const Injection>;

/// Passes everything on, through a FailingCommunicator while the injection is
/// armed.
class Switch final : public ForwardingCommunicator {
 public:
  Switch(const std::shared_ptr<Communicator>& inner, InjectionHandle injection)
      : ForwardingCommunicator(inner),
        inner_(inner),
        injection_(std::move(injection)) {}

  std::unique_ptr<Work> all_gather(
      std::span<std::byte> buffer,
      std::string what) override {
    return current().all_gather(buffer, std::move(what));
  }
  std::unique_ptr<Work> reduce_scatter(
      std::span<const std::byte> input,
      std::span<std::byte> output,
      DType dtype,
      std::span<const int64_t> cuts,
      std::string what,
      ReduceOp op) override {
    return current().reduce_scatter(
        input, output, dtype, cuts, std::move(what), op);
  }
  std::unique_ptr<Work> all_reduce(
      std::span<std::byte> buffer,
      DType dtype,
      ReduceOp op,
      std::string what) override {
    return current().all_reduce(buffer, dtype, op, std::move(what));
  }
  std::unique_ptr<Work>
  broadcast(std::span<std::byte> buffer, int root, std::string what) override {
    return current().broadcast(buffer, root, std::move(what));
  }
  void barrier(std::string what) override {
    current().barrier(std::move(what));
  }
  std::vector<std::string> exchange(std::string_view mine, std::string what)
      override {
    return current().exchange(mine, std::move(what));
  }
  std::shared_ptr<Communicator> split(int color, int key) override {
    return std::make_shared<Switch>(inner_->split(color, key), injection_);
  }

 private:
  Communicator& current() {
    if (version_ != injection_->version()) {
      version_ = injection_->version();
      current_ = injection_->plan().has_value()
          ? detail::make_failing_communicator(inner_, *injection_->plan())
          : inner_;
    }
    return current_ == nullptr ? *inner_ : *current_;
  }

  std::shared_ptr<Communicator> inner_;
  InjectionHandle injection_;
  std::shared_ptr<Communicator> current_;
  uint64_t version_ = 0;
};

/// Only what is split from it can fail.
class SplitsSwitches final : public ForwardingCommunicator {
 public:
  SplitsSwitches(World world, InjectionHandle injection)
      : ForwardingCommunicator(std::move(world)),
        injection_(std::move(injection)) {}

  std::shared_ptr<Communicator> split(int color, int key) override {
    return std::make_shared<Switch>(inner().split(color, key), injection_);
  }

 private:
  InjectionHandle injection_;
};

} // namespace

World failing_world(
    const World& world,
    const std::shared_ptr<const Injection>& injection) {
  return World(std::make_shared<SplitsSwitches>(world, injection));
}

} // namespace fsdp::testing
