#include "comm/c10d_communicator.h"

#include "comm/c10d_channel.h"
#include "comm/c10d_plans.h"
#include "comm/split_group.h"

#include <algorithm>
#include <functional>
#include <mutex>
#include <numeric>
#include <utility>

namespace fsdp::detail {
namespace {

class C10dWork : public Work {
 public:
  C10dWork(std::shared_ptr<C10dChannel> channel, C10dChannel::Ticket ticket)
      : channel_(std::move(channel)),
        ticket_(std::move(ticket)) {}

  ~C10dWork() override {
    if (ticket_.operation != nullptr) {
      channel_->release(ticket_);
    }
  }

  C10dWork(const C10dWork&) = delete;
  C10dWork& operator=(const C10dWork&) = delete;

  bool ready() override {
    return ticket_.operation == nullptr || channel_->ready(ticket_);
  }

  void wait() override {
    if (ticket_.operation != nullptr) {
      channel_->await(ticket_);
      ticket_.operation->deliver();
      ticket_ = {};
    }
  }

 private:
  std::shared_ptr<C10dChannel> channel_;
  C10dChannel::Ticket ticket_; // empty once the result is delivered
};

/// A channel and those that it was split into; see
/// [Note: Failures reach children].
class C10dPlace {
 public:
  explicit C10dPlace(std::shared_ptr<C10dChannel> channel)
      : channel_(std::move(channel)) {}

  void add_child(std::shared_ptr<C10dPlace> child) {
    const std::lock_guard lock(mutex_);
    std::erase_if(children_, [](const auto& each) { return each->is_over(); });
    children_.push_back(std::move(child));
  }

  void end_epoch(const std::string& failure) {
    channel_->end_epoch(failure);
    const std::lock_guard lock(mutex_);
    for (const auto& child : children_) {
      child->end_epoch(failure);
    }
  }

 private:
  bool is_over() {
    const std::lock_guard lock(mutex_);
    return channel_->has_left() &&
        std::all_of(children_.begin(), children_.end(), [](const auto& each) {
             return each->is_over();
           });
  }

  const std::shared_ptr<C10dChannel> channel_;
  std::mutex mutex_; // communicators of one rank may be used by several threads
  std::vector<std::shared_ptr<C10dPlace>> children_;
};

class C10dCommunicator : public Communicator {
 public:
  explicit C10dCommunicator(std::shared_ptr<C10dChannel> channel)
      : channel_(std::move(channel)),
        place_(std::make_shared<C10dPlace>(channel_)),
        planner_(rank(), size(), channel_->world().options().is_tagged) {}

  ~C10dCommunicator() override { channel_->leave(); }

  C10dCommunicator(const C10dCommunicator&) = delete;
  C10dCommunicator& operator=(const C10dCommunicator&) = delete;

  int rank() const override { return channel_->members().rank; }

  int size() const override { return channel_->members().size(); }

  std::chrono::milliseconds timeout() const override {
    return channel_->world().options().timeout;
  }

  std::unique_ptr<Work> all_gather(
      std::span<std::byte> buffer,
      std::string what) override {
    auto call = all_gather_call(std::ssize(buffer), size(), std::move(what));
    return start(planner_.all_gather(std::move(call), buffer));
  }

  std::unique_ptr<Work> reduce_scatter(
      std::span<const std::byte> input,
      std::span<std::byte> output,
      DType dtype,
      std::span<const int64_t> cuts,
      std::string what,
      ReduceOp op) override {
    auto call = reduce_scatter_call(
        std::ssize(input), dtype, cuts, size(), std::move(what), op);
    check_output(call, rank(), std::ssize(output));
    return start(planner_.reduce_scatter(std::move(call), input, output));
  }

  std::unique_ptr<Work> all_reduce(
      std::span<std::byte> buffer,
      DType dtype,
      ReduceOp op,
      std::string what) override {
    auto call = all_reduce_call(std::ssize(buffer), dtype, op, std::move(what));
    return start(planner_.all_reduce(std::move(call), buffer));
  }

  std::unique_ptr<Work>
  broadcast(std::span<std::byte> buffer, int root, std::string what) override {
    auto call =
        broadcast_call(std::ssize(buffer), root, size(), std::move(what));
    return start(planner_.broadcast(std::move(call), buffer));
  }

  void barrier(std::string what) override {
    run(planner_.barrier(
        {.kind = CallKind::kBarrier, .what = std::move(what)}));
  }

  std::vector<std::string> exchange(std::string_view mine, std::string what)
      override {
    return exchange_texts(
               {.kind = CallKind::kExchange, .what = std::move(what)}, mine)
        .second;
  }

  uint64_t epoch() const override { return channel_->epoch(); }

  void signal_failure(std::string_view message) override {
    place_->end_epoch(
        rank_text(rank(), size()) + " failed: " + std::string(message));
  }

  std::shared_ptr<Communicator> split(int color, int key) override;

  std::string aborted() const override { return channel_->world().aborted(); }

 private:
  C10dChannel::Ticket issue(C10dPlan plan) {
    const auto& world = channel_->world();
    if (!world.has_factory()) { // channels share one back end
      planner_.compare_first(plan, plan.call.what + " on " + channel_->name());
    } else if (world.options().compare_calls) {
      planner_.compare_first(plan, plan.call.what);
    }
    return channel_->issue(std::move(plan));
  }

  std::unique_ptr<Work> start(C10dPlan plan) {
    return std::make_unique<C10dWork>(channel_, issue(std::move(plan)));
  }

  C10dChannel::Ticket run(C10dPlan plan) {
    auto ticket = issue(std::move(plan));
    channel_->await(ticket);
    ticket.operation->deliver();
    return ticket;
  }

  std::pair<C10dChannel::Ticket, std::vector<std::string>> exchange_texts(
      Call call,
      std::string_view mine) {
    const auto texts = std::make_shared<std::vector<std::string>>();
    auto ticket = run(planner_.exchange(std::move(call), mine, texts));
    return {std::move(ticket), std::move(*texts)};
  }

  std::shared_ptr<C10dChannel> channel_;
  std::shared_ptr<C10dPlace> place_;
  C10dPlanner planner_;
};

std::shared_ptr<Communicator> C10dCommunicator::split(int color, int key) {
  const auto [ticket, texts] = exchange_texts(
      {.kind = CallKind::kSplit, .what = "split"}, encode_split(color, key));
  const auto members = group_of_split(texts, rank());
  auto child = std::make_shared<C10dCommunicator>(
      channel_->make_child(ticket, color, members.ranks, members.position));
  place_->add_child(child->place_);
  return child;
}

} // namespace

std::shared_ptr<Communicator> make_c10d_communicator(C10dWorldOptions options) {
  const auto world = C10dWorld::make(std::move(options));
  C10dChannel::Members members{
      .world_ranks =
          std::vector<int>(static_cast<size_t>(world->options().size)),
      .rank = world->options().rank};
  std::iota(members.world_ranks.begin(), members.world_ranks.end(), 0);
  std::shared_ptr<C10dGroup> group; // of the program's own back end
  if (!world->has_factory()) {
    group = std::make_shared<C10dGroup>(
        members.rank, members.size(), world->options().timeout);
    group->adopt(world->options().backend);
  }
  const auto channel = std::make_shared<C10dChannel>(
      world, "root", std::move(members), std::move(group));
  auto communicator = std::make_shared<C10dCommunicator>(channel);
  world->await_watch(); // which knows who dies in what follows
  communicator->barrier("start of the world");
  return communicator;
}

} // namespace fsdp::detail
