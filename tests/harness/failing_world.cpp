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

  std::shared_ptr<Communicator> split(int color, int key) override {
    return std::make_shared<Switch>(inner_->split(color, key), injection_);
  }

 protected:
  Communicator& called(const std::string& /*what*/) override {
    if (version_ != injection_->version()) {
      version_ = injection_->version();
      current_ = injection_->plan().has_value()
          ? detail::make_failing_communicator(inner_, *injection_->plan())
          : inner_;
    }
    return current_ == nullptr ? *inner_ : *current_;
  }

 private:
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
