#include "train.h"

#include "batches.h"
#include "ranks.h"
#include "schedule.h"

#include <chrono>
#include <cmath>
#include <stdexcept>

namespace row_encoder {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double rate) {
  for (auto& group : optimizer.param_groups()) {
    group.options().set_lr(rate);
  }
}

/// One optimizer step on this rank's part of a batch. Returns the loss of the
/// whole batch: parts are equal, so it is the mean over the ranks.
template <class Net>
double take_step(
    Net& net,
    const fsdp::World& world,
    torch::optim::Optimizer& optimizer,
    const Examples& part) {
  optimizer.zero_grad();
  auto loss = torch::nn::functional::cross_entropy(net(part.x), part.y);
  loss.backward();
  optimizer.step();
  const auto sum = sum_over_ranks(world, loss.template item<double>(), "loss");
  return sum / world.size();
}

void check_finite(const Step& step) {
  if (!std::isfinite(step.loss)) {
    throw std::runtime_error(
        "the loss of step " + std::to_string(step.number) +
        " is not a finite number. Use a smaller --lr.");
  }
}

StateBytes count_state(
    const std::vector<at::Tensor>& parameters,
    torch::optim::AdamW& optimizer) {
  const auto bytes_of = [](const at::Tensor& tensor) {
    return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
  };
  StateBytes bytes;
  for (const auto& parameter : parameters) {
    bytes.parameters += bytes_of(parameter);
    bytes.gradients += bytes_of(parameter.grad());
  }
  for (const auto& [key, state] : optimizer.state()) {
    auto& moments = static_cast<torch::optim::AdamWParamState&>(*state);
    bytes.optimizer +=
        bytes_of(moments.exp_avg()) + bytes_of(moments.exp_avg_sq());
  }
  return bytes;
}

StateBytes largest_state(const fsdp::World& world, const StateBytes& mine) {
  const auto largest = [&](int64_t bytes) {
    return static_cast<int64_t>(
        largest_over_ranks(world, static_cast<double>(bytes), "largest state"));
  };
  return {
      largest(mine.parameters),
      largest(mine.gradients),
      largest(mine.optimizer)};
}

template <class Net>
double accuracy(Net& net, const fsdp::World& world, const Examples& examples) {
  const torch::NoGradGuard no_grad;
  net->eval();
  const auto part =
      examples.select(part_of(torch::arange(examples.rows()), world));
  const auto right = net(part.x).argmax(1).eq(part.y).sum();
  return sum_over_ranks(world, right.template item<double>(), "accuracy") /
      static_cast<double>(examples.rows());
}

} // namespace

template <class Net>
Training train(
    Net& net,
    const fsdp::World& world,
    const Dataset& data,
    const Settings& settings,
    const OnStep& on_step) {
  const auto parameters = net->parameters();
  torch::optim::AdamW optimizer(parameters, settings.learning_rate);
  const OneCycle schedule(settings.learning_rate, settings.steps);
  Batches batches(data.train.rows(), settings.batch, settings.seed);

  Training training;
  net->train();
  for (int64_t i = 0; i < settings.steps; ++i) {
    const auto start = Clock::now();
    set_learning_rate(optimizer, schedule.at(i));
    const auto part = data.train.select(part_of(batches.at(i), world));
    Step step{i + 1, schedule.at(i)};
    step.loss = take_step(net, world, optimizer, part);
    step.seconds = seconds_since(start);
    check_finite(step);
    training.steps.push_back(step);
    if (on_step) {
      on_step(step);
    }
  }

  const auto state = count_state(parameters, optimizer);
  training.state = largest_state(world, state);
  training.state_of_all_ranks = static_cast<int64_t>(
      sum_over_ranks(world, static_cast<double>(state.total()), "all state"));
  training.accuracy = accuracy(net, world, data.held_out);
  return training;
}

template Training train(
    RowEncoder&,
    const fsdp::World&,
    const Dataset&,
    const Settings&,
    const OnStep&);
template Training train(
    fsdp::FullyShardedDataParallel<RowEncoderImpl>&,
    const fsdp::World&,
    const Dataset&,
    const Settings&,
    const OnStep&);

} // namespace row_encoder
