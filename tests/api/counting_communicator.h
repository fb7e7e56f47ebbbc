#pragma once

#include "harness/forwarding_communicator.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {

/// Notes what every call was. Splits write to the same notes.
class CountingCommunicator final : public ForwardingCommunicator {
 public:
  using Notes = std::vector<std::string>;

  explicit CountingCommunicator(World world)
      : ForwardingCommunicator(std::move(world)),
        notes_(std::make_shared<Notes>()) {}
  CountingCommunicator(
      std::shared_ptr<Communicator> inner,
      std::shared_ptr<Notes> notes)
      : ForwardingCommunicator(std::move(inner)),
        notes_(std::move(notes)) {}

  Notes& notes() { return *notes_; }

  /// How many notes hold `part`.
  int64_t count(const std::string& part) const {
    return std::count_if(
        notes_->begin(), notes_->end(), [&](const std::string& note) {
          return note.find(part) != std::string::npos;
        });
  }

  std::shared_ptr<Communicator> split(int color, int key) override {
    return std::make_shared<CountingCommunicator>(
        inner().split(color, key), notes_);
  }

 protected:
  Communicator& called(const std::string& what) override {
    notes_->push_back(what);
    return inner();
  }

 private:
  std::shared_ptr<Notes> notes_;
};

} // namespace fsdp::testing
