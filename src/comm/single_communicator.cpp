#include "comm/single_communicator.h"

#include "comm/call.h"
#include "comm/completed_work.h"
#include "comm/epoch_counter.h"

#include <cstring>
#include <utility>

namespace fsdp::detail {
namespace {

class SingleCommunicator : public Communicator {
 public:
  explicit SingleCommunicator(
      const std::shared_ptr<const EpochCounter>& parent_epoch = nullptr)
      : epoch_(std::make_shared<EpochCounter>(parent_epoch)) {}

  int rank() const override { return 0; }

  int size() const override { return 1; }

  std::chrono::milliseconds timeout() const override {
    return std::chrono::milliseconds(0); // nothing ever waits
  }

  std::unique_ptr<Work> all_gather(std::span<std::byte>, std::string) override {
    return std::make_unique<CompletedWork>();
  }

  std::unique_ptr<Work> reduce_scatter(
      std::span<const std::byte> input,
      std::span<std::byte> output,
      DType dtype,
      std::span<const int64_t> cuts,
      std::string what,
      ReduceOp op) override {
    const Call call = reduce_scatter_call(
        std::ssize(input), dtype, cuts, size(), std::move(what), op);
    check_output(call, rank(), std::ssize(output));
    if (!input.empty()) {
      std::memmove(output.data(), input.data(), input.size());
    }
    return std::make_unique<CompletedWork>();
  }

  std::unique_ptr<Work> all_reduce(
      std::span<std::byte> buffer,
      DType dtype,
      ReduceOp op,
      std::string what) override {
    all_reduce_call(std::ssize(buffer), dtype, op, std::move(what));
    return std::make_unique<CompletedWork>();
  }

  std::unique_ptr<Work>
  broadcast(std::span<std::byte> buffer, int root, std::string what) override {
    broadcast_call(std::ssize(buffer), root, size(), std::move(what));
    return std::make_unique<CompletedWork>();
  }

  void barrier(std::string) override {}

  std::vector<std::string> exchange(std::string_view mine, std::string)
      override {
    return {std::string(mine)};
  }

  uint64_t epoch() const override { return epoch_->value(); }

  void signal_failure(std::string_view) override { epoch_->end_epoch(); }

  std::shared_ptr<Communicator> split(int, int) override {
    return std::make_shared<SingleCommunicator>(epoch_);
  }

 private:
  std::shared_ptr<EpochCounter> epoch_;
};

} // namespace

std::shared_ptr<Communicator> make_single_communicator() {
  return std::make_shared<SingleCommunicator>();
}

} // namespace fsdp::detail
