#include "comm/thread_communicator.h"

#include "comm/reduce.h"
#include "comm/thread_group.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <tuple>
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

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadGroup> group, int rank)
      : group_(std::move(group)),
        rank_(rank) {}

  ~ThreadCommunicator() override { group_->leave(rank_); }

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
      std::string what) override;

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
    group_->signal_failure(rank_, message);
  }

  std::shared_ptr<Communicator> split(int color, int key) override;

 private:
  ThreadGroup::Ticket issue(Call call, std::span<const std::byte> contribution);
  std::unique_ptr<Work> start(
      Call call,
      std::span<const std::byte> contribution,
      ThreadWork::Deliver deliver);

  std::shared_ptr<ThreadGroup> group_;
  int rank_;
};

ThreadGroup::Ticket ThreadCommunicator::issue(
    Call call,
    std::span<const std::byte> contribution) {
  return group_->issue(
      rank_, std::move(call), Bytes(contribution.begin(), contribution.end()));
}

std::unique_ptr<Work> ThreadCommunicator::start(
    Call call,
    std::span<const std::byte> contribution,
    ThreadWork::Deliver deliver) {
  return std::make_unique<ThreadWork>(
      group_, issue(std::move(call), contribution), std::move(deliver));
}

std::unique_ptr<Work> ThreadCommunicator::all_gather(
    std::span<std::byte> buffer,
    std::string what) {
  Call call = all_gather_call(std::ssize(buffer), size(), std::move(what));
  const size_t slice = buffer.size() / static_cast<size_t>(size());
  const auto mine = static_cast<size_t>(rank_);
  return start(
      std::move(call),
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
    std::string what) {
  Call call = reduce_scatter_call(
      std::ssize(input), dtype, cuts, size(), std::move(what));
  check_output(call, rank_, std::ssize(output));
  const int64_t first_numel = cuts[static_cast<size_t>(rank_)];
  return start(
      std::move(call),
      input,
      [output, first_numel](const Operation& operation) {
        reduce_contributions(operation, output, first_numel);
      });
}

std::unique_ptr<Work> ThreadCommunicator::all_reduce(
    std::span<std::byte> buffer,
    DType dtype,
    ReduceOp op,
    std::string what) {
  Call call = all_reduce_call(std::ssize(buffer), dtype, op, std::move(what));
  return start(std::move(call), buffer, [buffer](const Operation& operation) {
    reduce_contributions(operation, buffer, 0);
  });
}

std::unique_ptr<Work> ThreadCommunicator::broadcast(
    std::span<std::byte> buffer,
    int root,
    std::string what) {
  Call call = broadcast_call(std::ssize(buffer), root, size(), std::move(what));
  const bool is_root = root == rank_;
  return start(
      std::move(call),
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

std::vector<std::string> ThreadCommunicator::exchange(
    std::string_view mine,
    std::string what) {
  const auto ticket = issue(
      Call{.kind = CallKind::kExchange, .what = std::move(what)},
      std::as_bytes(std::span(mine)));
  group_->await(ticket);
  std::vector<std::string> all;
  for (const auto& [present, bytes] : ticket.operation->contributions) {
    all.emplace_back(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return all;
}

std::shared_ptr<Communicator> ThreadCommunicator::split(int color, int key) {
  const std::array<int, 2> mine = {color, key};
  const auto ticket = issue(
      Call{.kind = CallKind::kSplit, .what = "split"},
      std::as_bytes(std::span(mine)));
  group_->await(ticket);
  std::vector<std::pair<int, int>> members; // key, rank here
  for (int r = 0; r < size(); ++r) {
    std::array<int, 2> theirs = {};
    std::memcpy(
        theirs.data(),
        ticket.operation->contributions[static_cast<size_t>(r)].bytes.data(),
        sizeof(theirs));
    if (theirs[0] == color) {
      members.emplace_back(theirs[1], r);
    }
  }
  std::sort(members.begin(), members.end());
  const auto self =
      std::find(members.begin(), members.end(), std::pair(key, rank_));
  return std::make_shared<ThreadCommunicator>(
      group_->child(ticket, color, static_cast<int>(members.size())),
      static_cast<int>(self - members.begin()));
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

} // namespace fsdp::detail
