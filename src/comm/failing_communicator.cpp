#include "comm/failing_communicator.h"

#include <utility>

namespace fsdp::detail {
namespace {

using Moment = FailurePlan::Moment;

[[noreturn]] void fail(Communicator& inner, const std::string& text) {
  inner.signal_failure(text);
  throw CommunicationError(text);
}

/// Fails in wait(), once for the epoch and by its text ever after.
class FailingWork : public Work {
 public:
  FailingWork(
      std::shared_ptr<Communicator> inner,
      std::unique_ptr<Work> work,
      std::string text)
      : inner_(std::move(inner)),
        work_(std::move(work)),
        text_(std::move(text)),
        epoch_(inner_->epoch()) {}

  bool ready() override { return true; }

  void wait() override {
    if (inner_->epoch() != epoch_) {
      throw CommunicationError(text_);
    }
    fail(*inner_, text_);
  }

 private:
  std::shared_ptr<Communicator> inner_;
  std::unique_ptr<Work> work_;
  std::string text_;
  uint64_t epoch_;
};

class FailingCommunicator : public Communicator {
 public:
  FailingCommunicator(std::shared_ptr<Communicator> inner, FailurePlan plan)
      : inner_(std::move(inner)),
        plan_(std::move(plan)) {}

  int rank() const override { return inner_->rank(); }

  int size() const override { return inner_->size(); }

  std::chrono::milliseconds timeout() const override {
    return inner_->timeout();
  }

  std::unique_ptr<Work> all_gather(
      std::span<std::byte> buffer,
      std::string what) override {
    const bool due = begin(what);
    return end(inner_->all_gather(buffer, std::move(what)), due);
  }

  std::unique_ptr<Work> reduce_scatter(
      std::span<const std::byte> input,
      std::span<std::byte> output,
      DType dtype,
      std::span<const int64_t> cuts,
      std::string what,
      ReduceOp op) override {
    const bool due = begin(what);
    return end(
        inner_->reduce_scatter(input, output, dtype, cuts, std::move(what), op),
        due);
  }

  std::unique_ptr<Work> all_reduce(
      std::span<std::byte> buffer,
      DType dtype,
      ReduceOp op,
      std::string what) override {
    const bool due = begin(what);
    return end(inner_->all_reduce(buffer, dtype, op, std::move(what)), due);
  }

  std::unique_ptr<Work>
  broadcast(std::span<std::byte> buffer, int root, std::string what) override {
    const bool due = begin(what);
    return end(inner_->broadcast(buffer, root, std::move(what)), due);
  }

  void barrier(std::string what) override {
    const bool due = begin(what);
    inner_->barrier(std::move(what));
    end(due);
  }

  std::vector<std::string> exchange(std::string_view mine, std::string what)
      override {
    const bool due = begin(what);
    auto all = inner_->exchange(mine, std::move(what));
    end(due);
    return all;
  }

  uint64_t epoch() const override { return inner_->epoch(); }

  void signal_failure(std::string_view message) override {
    inner_->signal_failure(message);
  }

  std::shared_ptr<Communicator> split(int color, int key) override {
    const bool due = begin("split");
    auto child = inner_->split(color, key);
    end(due);
    return child;
  }

 private:
  /// Counts a call, fails if that is due now, and says whether it is due once
  /// the inner call is made.
  bool begin(const std::string& what) {
    if (what.find(plan_.what) == std::string::npos) {
      return false;
    }
    ++matches_;
    const bool due =
        plan_.repeat ? matches_ >= plan_.nth : matches_ == plan_.nth;
    if (due && plan_.moment == Moment::kIssue) {
      fail(*inner_, plan_.text);
    }
    return due;
  }

  void end(bool due) {
    if (due) {
      fail(*inner_, plan_.text);
    }
  }

  std::unique_ptr<Work> end(std::unique_ptr<Work> work, bool due) {
    if (!due) {
      return work;
    }
    return std::make_unique<FailingWork>(inner_, std::move(work), plan_.text);
  }

  std::shared_ptr<Communicator> inner_;
  FailurePlan plan_;
  int matches_ = 0;
};

} // namespace

std::shared_ptr<Communicator> make_failing_communicator(
    std::shared_ptr<Communicator> inner,
    FailurePlan plan) {
  return std::make_shared<FailingCommunicator>(
      std::move(inner), std::move(plan));
}

} // namespace fsdp::detail
