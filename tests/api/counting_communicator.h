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

  std::unique_ptr<Work> all_gather(
      std::span<std::byte> buffer,
      std::string what) override {
    notes_->push_back(what);
    return inner().all_gather(buffer, std::move(what));
  }
  std::unique_ptr<Work> reduce_scatter(
      std::span<const std::byte> input,
      std::span<std::byte> output,
      DType dtype,
      std::span<const int64_t> cuts,
      std::string what,
      ReduceOp op) override {
    notes_->push_back(what);
    return inner().reduce_scatter(
        input, output, dtype, cuts, std::move(what), op);
  }
  std::unique_ptr<Work> all_reduce(
      std::span<std::byte> buffer,
      DType dtype,
      ReduceOp op,
      std::string what) override {
    notes_->push_back(what);
    return inner().all_reduce(buffer, dtype, op, std::move(what));
  }
  std::unique_ptr<Work>
  broadcast(std::span<std::byte> buffer, int root, std::string what) override {
    notes_->push_back(what);
    return inner().broadcast(buffer, root, std::move(what));
  }
  void barrier(std::string what) override {
    notes_->push_back(what);
    inner().barrier(std::move(what));
  }
  std::vector<std::string> exchange(std::string_view mine, std::string what)
      override {
    notes_->push_back(what);
    return inner().exchange(mine, std::move(what));
  }
  std::shared_ptr<Communicator> split(int color, int key) override {
    return std::make_shared<CountingCommunicator>(
        inner().split(color, key), notes_);
  }

 private:
  std::shared_ptr<Notes> notes_;
};

} // namespace fsdp::testing
