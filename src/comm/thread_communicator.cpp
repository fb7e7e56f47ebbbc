#include "comm/thread_communicator.h"

#include "comm/reduce.h"
#include "comm/split_group.h"
#include "comm/thread_group.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace fsdp::detail {
namespace {

using Bytes = std::vector<std::byte>;

void copy_bytes(std::span<const std::byte> from, std::byte* to) {
  if (!from.empty()) {
    std::memcpy(to, from.data(), from.size());
  }
}

void reduce_contributions(
    const Operation& operation,
    std::span<std::byte> output,
    int64_t first_numel) {
  const DType dtype = *operation.call.dtype;
  std::vector<const std::byte*> inputs;
  for (const auto& contribution : operation.contributions) {
    inputs.push_back(contribution.bytes.data() + first_numel * size_of(dtype));
  }
  reduce(
      *operation.call.op,
      dtype,
      inputs,
      output.data(),
      std::ssize(output) / size_of(dtype));
}

class ThreadWork : public Work {
 public:
  using Deliver = std::function<void(const Operation&)>;

  ThreadWork(
      std::shared_ptr<ThreadGroup> group,
      ThreadGroup::Ticket ticket,
      Deliver deliver)
      : group_(std::move(group)),
        ticket_(std::move(ticket)),
        deliver_(std::move(deliver)) {}

  bool ready() override {
    return ticket_.operation == nullptr || group_->ready(ticket_);
  }

  void wait() override {
    if (ticket_.operation == nullptr) {
      return;
    }
    group_->await(ticket_);
    deliver_(*ticket_.operation);
    ticket_ = {};
  }

 private:
  std::shared_ptr<ThreadGroup> group_;
  ThreadGroup::Ticket ticket_; // empty once the result is delivered
  Deliver deliver_;
};

/// A rank's place in a group, and the places that it got by splitting that.
///
/// [Note: Failures reach children] A failure ends the epoch of the failed rank
/// in its group and in all groups below, each at its own epoch and number of
/// calls; a group knows neither its parent nor its children. Places outlive the
/// communicators they belong to: an exception that leaves a rank's main
/// function destroys nets, and with them children, before it is caught and
/// signalled. Peers therefore wait a little for the reason when a communicator
/// goes while an exception is under way.
class Place {
 public:
  Place(const std::shared_ptr<ThreadGroup>& group, int rank)
      : group_(group),
        rank_(rank) {}

  void add_child(std::shared_ptr<Place> child) {
    const std::lock_guard lock(mutex_);
    std::erase_if(children_, [](const auto& each) { return each->is_over(); });
    children_.push_back(std::move(child));
  }

  void end_epoch(const std::string& failure) {
    visit(
        [&](ThreadGroup& group, int rank) { group.end_epoch(rank, failure); });
  }

  void leave_for_good() {
    visit([](ThreadGroup& group, int rank) {
      group.leave(rank, std::chrono::milliseconds(0));
    });
  }

 private:
  void visit(const std::function<void(ThreadGroup&, int)>& act) {
    if (const auto group = group_.lock()) {
      act(*group, rank_);
    }
    const std::lock_guard lock(mutex_);
    for (const auto& child : children_) {
      child->visit(act);
    }
  }

  /// Whether nobody uses this group any more, nor one below.
  bool is_over() {
    const std::lock_guard lock(mutex_);
    return group_.expired() &&
        std::all_of(children_.begin(), children_.end(), [](const auto& each) {
             return each->is_over();
           });
  }

  const std::weak_ptr<ThreadGroup> group_;
  const int rank_;
  std::mutex mutex_; // communicators of one rank may be used by several threads
  std::vector<std::shared_ptr<Place>> children_;
};

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadGroup> group, int rank)
      : group_(std::move(group)),
        rank_(rank),
        place_(std::make_shared<Place>(group_, rank)) {}

  // See [Note: Failures reach children].
  ~ThreadCommunicator() override {
    constexpr std::chrono::milliseconds kUnwinding(1000);
    const bool unwinds = std::uncaught_exceptions() > 0;
    group_->leave(rank_, unwinds ? kUnwinding : std::chrono::milliseconds(0));
  }

  ThreadCommunicator(const ThreadCommunicator&) = delete;
  ThreadCommunicator& operator=(const ThreadCommunicator&) = delete;

  int rank() const override { return rank_; }

  int size() const override { return group_->size(); }

  std::chrono::milliseconds timeout() const override {
    return group_->timeout();
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

  uint64_t epoch() const override { return group_->epoch(rank_); }

  void signal_failure(std::string_view message) override {
    place_->end_epoch(
        rank_text(rank_, size()) + " failed: " + std::string(message));
  }

  std::shared_ptr<Communicator> split(int color, int key) override;

  void leave_for_good() { place_->leave_for_good(); }

 private:
  ThreadGroup::Ticket issue(
      const Call& call,
      std::span<const std::byte> contribution);
  std::unique_ptr<Work> start(
      const Call& call,
      std::span<const std::byte> contribution,
      ThreadWork::Deliver deliver);

  std::shared_ptr<ThreadGroup> group_;
  int rank_;
  std::shared_ptr<Place> place_;
};

ThreadGroup::Ticket ThreadCommunicator::issue(
    const Call& call,
    std::span<const std::byte> contribution) {
  return group_->issue(
      rank_, call, Bytes(contribution.begin(), contribution.end()));
}

std::unique_ptr<Work> ThreadCommunicator::start(
    const Call& call,
    std::span<const std::byte> contribution,
    ThreadWork::Deliver deliver) {
  return std::make_unique<ThreadWork>(
      group_, issue(call, contribution), std::move(deliver));
}

std::unique_ptr<Work> ThreadCommunicator::all_gather(
    std::span<std::byte> buffer,
    std::string what) {
  const Call call =
      all_gather_call(std::ssize(buffer), size(), std::move(what));
  const size_t slice = buffer.size() / static_cast<size_t>(size());
  const auto mine = static_cast<size_t>(rank_);
  return start(
      call,
      buffer.subspan(mine * slice, slice),
      [buffer, slice, mine](const Operation& operation) {
        for (size_t r = 0; r < operation.contributions.size(); ++r) {
          if (r != mine) {
            copy_bytes(
                operation.contributions[r].bytes, buffer.data() + r * slice);
          }
        }
      });
}

std::unique_ptr<Work> ThreadCommunicator::reduce_scatter(
    std::span<const std::byte> input,
    std::span<std::byte> output,
    DType dtype,
    std::span<const int64_t> cuts,
    std::string what,
    ReduceOp op) {
  const Call call = reduce_scatter_call(
      std::ssize(input), dtype, cuts, size(), std::move(what), op);
  check_output(call, rank_, std::ssize(output));
  const int64_t first_numel = cuts[static_cast<size_t>(rank_)];
  return start(call, input, [output, first_numel](const Operation& operation) {
    reduce_contributions(operation, output, first_numel);
  });
}

std::unique_ptr<Work> ThreadCommunicator::all_reduce(
    std::span<std::byte> buffer,
    DType dtype,
    ReduceOp op,
    std::string what) {
  const Call call =
      all_reduce_call(std::ssize(buffer), dtype, op, std::move(what));
  return start(call, buffer, [buffer](const Operation& operation) {
    reduce_contributions(operation, buffer, 0);
  });
}

std::unique_ptr<Work> ThreadCommunicator::broadcast(
    std::span<std::byte> buffer,
    int root,
    std::string what) {
  const Call call =
      broadcast_call(std::ssize(buffer), root, size(), std::move(what));
  const bool is_root = root == rank_;
  return start(
      call,
      is_root ? buffer : std::span<std::byte>(),
      [buffer, root, is_root](const Operation& operation) {
        if (!is_root) {
          copy_bytes(
              operation.contributions[static_cast<size_t>(root)].bytes,
              buffer.data());
        }
      });
}

void ThreadCommunicator::barrier(std::string what) {
  group_->await(
      issue(Call{.kind = CallKind::kBarrier, .what = std::move(what)}, {}));
}

std::vector<std::string> texts_of(const Operation& operation) {
  std::vector<std::string> texts;
  for (const auto& [present, bytes] : operation.contributions) {
    texts.emplace_back(
        reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return texts;
}

std::vector<std::string> ThreadCommunicator::exchange(
    std::string_view mine,
    std::string what) {
  const auto ticket = issue(
      Call{.kind = CallKind::kExchange, .what = std::move(what)},
      std::as_bytes(std::span(mine)));
  group_->await(ticket);
  return texts_of(*ticket.operation);
}

std::shared_ptr<Communicator> ThreadCommunicator::split(int color, int key) {
  const std::string mine = encode_split(color, key);
  const auto ticket = issue(
      Call{.kind = CallKind::kSplit, .what = "split"},
      std::as_bytes(std::span(mine)));
  group_->await(ticket);
  const auto members = group_of_split(texts_of(*ticket.operation), rank_);
  auto child = std::make_shared<ThreadCommunicator>(
      group_->child(ticket, color, static_cast<int>(members.ranks.size())),
      members.position);
  place_->add_child(child->place_);
  return child;
}

} // namespace

std::vector<std::shared_ptr<Communicator>> make_thread_communicators(
    int size,
    std::chrono::milliseconds timeout) {
  const auto group = std::make_shared<ThreadGroup>(size, timeout);
  std::vector<std::shared_ptr<Communicator>> communicators;
  for (int r = 0; r < size; ++r) {
    communicators.push_back(std::make_shared<ThreadCommunicator>(group, r));
  }
  return communicators;
}

void leave_for_good(Communicator& communicator) {
  auto* const mine = dynamic_cast<ThreadCommunicator*>(&communicator);
  if (mine == nullptr) {
    throw std::invalid_argument(
        "leave_for_good: expected a communicator of threads, but got another "
        "for rank " +
        std::to_string(communicator.rank()));
  }
  mine->leave_for_good();
}

} // namespace fsdp::detail
