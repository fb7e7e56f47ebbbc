#include "sharded_training.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>
#include <thread>
#include <utility>

namespace fsdp::detail {
namespace {

uint32_t scrambled(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  uint32_t value = 0x9e3779b9;
  for (const uint32_t each : {a, b, c, d}) {
    value = (value ^ each) * 0x85ebca6b;
    value ^= value >> 15;
  }
  return value;
}

uint32_t weight(size_t unit, size_t element, uint32_t version) {
  return scrambled(
      static_cast<uint32_t>(unit), static_cast<uint32_t>(element), version, 1);
}

// Small integers, so that sums are exact.
float gradient(
    size_t unit,
    size_t element,
    int step,
    int rank,
    int micro_batch) {
  const auto place = static_cast<uint32_t>(unit * 10'000 + element);
  const auto batch = static_cast<uint32_t>(rank * 10 + micro_batch);
  return static_cast<float>(
      scrambled(place, static_cast<uint32_t>(step), batch, 2) % 1000);
}

/// The failure of a step that was to fail here.
class PlannedFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

std::span<std::byte> bytes_of(std::vector<float>& values) {
  return std::as_writable_bytes(std::span(values));
}

} // namespace

std::string ShardedTraining::Step::failure_text() const {
  return "planned failure of step " + std::to_string(number) + ".";
}

ShardedTraining::ShardedTraining(Communicator& world, Settings settings)
    : world_(world),
      settings_(settings),
      plan_(settings.seed),
      own_(settings.seed * 1000 + static_cast<uint64_t>(world.rank())) {
  gathers_ = world.split(0, world.rank());
  reductions_ = world.split(0, world.rank());
  reports_ = world.split(0, world.rank());
}

void ShardedTraining::run() {
  std::vector<int64_t> slice_bytes;
  for (const size_t numel : kSliceNumel) {
    slice_bytes.push_back(static_cast<int64_t>(numel * sizeof(uint32_t)));
  }
  weights_ = std::make_unique<SharedWeights>(
      slices_to_use(gathers_->share_slices(slice_bytes)));
  try {
    write();
    for (step_ = 0; step_ < settings_.steps; ++step_) {
      run_step(draw_step(step_));
    }
    world_.barrier("end of the training");
  } catch (const WrongTraining& error) {
    world_.signal_failure(error.what());
    throw;
  }
}

ShardedTraining::Step ShardedTraining::draw_step(int number) {
  Step step;
  step.number = number;
  step.micro_batches =
      static_cast<int>(std::max<uint64_t>(draw(plan_, 5), 2)) - 1;
  const bool fails = draw(plan_, 5) == 0;
  const auto place = static_cast<Place>(1 + draw(plan_, 5));
  step.failing_rank =
      static_cast<int>(draw(plan_, static_cast<uint64_t>(world_.size())));
  step.failing_micro_batch = place == Place::kSettlement
      ? step.micro_batches - 1
      : static_cast<int>(
            draw(plan_, static_cast<uint64_t>(step.micro_batches)));
  step.failure = fails ? place : Place::kNowhere;
  step.evaluates_before_write = draw(plan_, 4) == 0;
  step.writes_again = draw(plan_, 5) == 0;
  return step;
}

void ShardedTraining::run_step(const Step& step) {
  if (!train(step)) {
    ++failed_steps_;
    return;
  }
  if (step.evaluates_before_write) { // all ranks do, or none
    evaluate(static_cast<int>(1 + draw(own_, 3)), step);
  }
  write();
  if (step.writes_again) {
    evaluate(static_cast<int>(1 + draw(own_, 3)), step);
    write();
  }
}

bool ShardedTraining::train(const Step& step) {
  try {
    evaluate(static_cast<int>(draw(own_, 3)), step); // a peer may fail by now
    for (int i = 0; i < step.micro_batches; ++i) {
      train_micro_batch(step, i);
    }
  } catch (const PlannedFailure&) {
    drop_gradients();
    return false;
  } catch (const CommunicationError& error) {
    const std::string text = error.what();
    if (!step.fails() || text.find(step.failure_text()) == std::string::npos) {
      throw;
    }
    drop_gradients();
    return false;
  }
  if (step.fails()) {
    throw WrongTraining(where() + "succeeded, but a rank has failed in it");
  }
  return true;
}

void ShardedTraining::train_micro_batch(const Step& step, int micro_batch) {
  in_region(step, micro_batch, [&] {
    for (size_t unit = 0; unit < kUnits; ++unit) {
      read(unit, "forward");
      if (unit == kUnits / 2) {
        maybe_fail(step, micro_batch, Place::kForward);
      }
    }
  });
  in_region(step, micro_batch, [&] { backward(step, micro_batch); });
  if (micro_batch + 1 == step.micro_batches) {
    check_gradients(step);
  }
}

void ShardedTraining::evaluate(int times, const Step& step) {
  Step evaluation = step;
  evaluation.failure = Place::kNowhere;
  for (; times > 0; --times) {
    in_region(evaluation, 0, [&] {
      for (size_t unit = 0; unit < kUnits; ++unit) {
        read(unit, "evaluation");
      }
    });
  }
}

void ShardedTraining::write() {
  await_write();
  ++version_;
  const auto rank = static_cast<size_t>(world_.rank());
  for (size_t unit = 0; unit < kUnits; ++unit) {
    const auto own = weights_->slices()->own(unit);
    for (size_t i = 0; i < kSliceNumel[unit]; ++i) {
      const auto value = weight(unit, rank * kSliceNumel[unit] + i, version_);
      std::memcpy(&own[i * sizeof(value)], &value, sizeof(value));
    }
    pause();
  }
}

// Regions.

template <class Body>
void ShardedTraining::in_region(
    const Step& step,
    int micro_batch,
    Body&& body) {
  epochs_ = {gathers_->epoch(), reductions_->epoch(), reports_->epoch()};
  settled_ = false;
  try {
    maybe_fail(step, micro_batch, Place::kOpening);
    open();
    body();
  } catch (const std::exception& error) {
    abandon(error.what());
    throw;
  }
  if (settled_) {
    weights_->retire();
  }
}

void ShardedTraining::open() {
  if (!weights_->is_published()) {
    weights_->await_writable("weights of the next step");
    pause();
    weights_->publish();
  }
}

void ShardedTraining::abandon(const std::string& reason) {
  for (Gradients& each : gradients_) {
    each.reduction.reset();
  }
  if (settled_) {
    weights_->retire();
  }
  size_t next = 0;
  for (Communicator* each :
       {gathers_.get(), reductions_.get(), reports_.get()}) {
    if (each->epoch() == epochs_[next++]) { // else it has been told
      each->signal_failure(reason);
    }
  }
}

void ShardedTraining::read(size_t unit, const char* place) {
  weights_->await_readable("all_gather of unit " + std::to_string(unit));
  pause();
  const auto bytes = weights_->slices()->whole(unit);
  const size_t numel = whole_numel(unit);
  for (size_t i = 0; i < numel; ++i) {
    uint32_t value = 0;
    std::memcpy(&value, &bytes[i * sizeof(value)], sizeof(value));
    if (value != weight(unit, i, version_)) {
      throw WrongTraining(
          where() + "wrong weight " + std::to_string(i) + " of unit " +
          std::to_string(unit) + " in " + place);
    }
  }
}

// Gradients.

void ShardedTraining::backward(const Step& step, int micro_batch) {
  const bool syncs = micro_batch + 1 == step.micro_batches;
  next_ = kUnits;
  for (size_t unit = kUnits; unit-- > 0;) {
    gradients_[unit].arrived = false;
  }
  for (size_t unit = kUnits; unit-- > 0;) {
    read(unit, "backward");
    add_gradient(step, micro_batch, unit);
    if (syncs) {
      start_next();
    }
    if (unit == kUnits / 2) {
      maybe_fail(step, micro_batch, Place::kBackward);
    }
  }
  for (size_t unit = 0; unit < kUnits; ++unit) {
    read(unit, "a late read"); // of a graph that is kept, for instance
  }
  maybe_fail(step, micro_batch, Place::kEndOfBackward);
  if (syncs) {
    settle(step, micro_batch);
  }
}

void ShardedTraining::add_gradient(
    const Step& step,
    int micro_batch,
    size_t unit) {
  Gradients& gradients = gradients_[unit];
  const auto first = static_cast<size_t>(world_.rank()) * kSliceNumel[unit];
  gradients.expected.resize(kSliceNumel[unit]);
  for (int rank = 0; rank < world_.size(); ++rank) {
    if (!uses(rank, unit, step, micro_batch)) {
      continue;
    }
    gradients.is_used = true;
    for (size_t i = 0; i < kSliceNumel[unit]; ++i) {
      gradients.expected[i] +=
          gradient(unit, first + i, step.number, rank, micro_batch);
    }
  }
  if (uses(world_.rank(), unit, step, micro_batch)) {
    gradients.sum.resize(whole_numel(unit));
    for (size_t i = 0; i < gradients.sum.size(); ++i) {
      gradients.sum[i] +=
          gradient(unit, i, step.number, world_.rank(), micro_batch);
    }
    gradients.arrived = true;
  }
}

void ShardedTraining::start_next() {
  while (next_ > 0 && gradients_[next_ - 1].arrived) {
    start_reduction(--next_);
    for (Gradients& each : gradients_) {
      if (each.reduction != nullptr && each.reduction->work->ready()) {
        await_reduction(*each.reduction->work);
      }
    }
  }
}

void ShardedTraining::start_reduction(size_t unit) {
  pause();
  std::vector<int64_t> cuts;
  for (int rank = 0; rank <= world_.size(); ++rank) {
    cuts.push_back(rank * static_cast<int64_t>(kSliceNumel[unit]));
  }
  auto reduction = std::make_unique<Reduction>();
  reduction->input = std::exchange(gradients_[unit].sum, {});
  reduction->input.resize(whole_numel(unit)); // zeros where it is unused here
  reduction->output.resize(kSliceNumel[unit]);
  reduction->work = reductions_->reduce_scatter(
      bytes_of(reduction->input),
      bytes_of(reduction->output),
      DType::kFloat32,
      cuts,
      "reduce_scatter of unit " + std::to_string(unit));
  gradients_[unit].reduction = std::move(reduction);
}

void ShardedTraining::settle(const Step& step, int micro_batch) {
  std::string report;
  for (const Gradients& each : gradients_) {
    report += each.reduction != nullptr || !each.sum.empty() ? '1' : '0';
  }
  const auto all = reports_->exchange(report, "settlement of gradients");
  for (size_t unit = kUnits; unit-- > 0;) {
    const bool wanted =
        std::any_of(all.begin(), all.end(), [&](const auto& its) {
          return its[unit] == '1';
        });
    if (wanted && gradients_[unit].reduction == nullptr) {
      start_reduction(unit);
    }
  }
  for (Gradients& each : gradients_) {
    if (each.reduction != nullptr) {
      await_reduction(*each.reduction->work);
    }
  }
  maybe_fail(step, micro_batch, Place::kSettlement);
  await_end_of_settlement();
  settled_ = true;
}

void ShardedTraining::check_gradients(const Step& step) {
  for (size_t unit = 0; unit < kUnits; ++unit) {
    const Gradients& gradients = gradients_[unit];
    const bool is_right = gradients.reduction == nullptr ? !gradients.is_used
                                                         : gradients.is_used &&
            gradients.reduction->output == gradients.expected;
    // A step that was to fail has no gradients, and train() says so.
    if (!is_right && !step.fails()) {
      throw WrongTraining(
          where() + "wrong gradient of unit " + std::to_string(unit));
    }
  }
  drop_gradients();
}

void ShardedTraining::drop_gradients() {
  gradients_ = {};
}

// The plan.

bool ShardedTraining::uses(
    int rank,
    size_t unit,
    const Step& step,
    int micro_batch) const {
  const auto number = static_cast<uint32_t>(step.number);
  const auto place = static_cast<uint32_t>(unit);
  const auto batch = static_cast<uint32_t>(rank * 10 + micro_batch);
  return scrambled(number, place, 0, 3) % 10 != 0 && // nobody
      scrambled(number, place, batch, 4) % 6 != 0;
}

void ShardedTraining::maybe_fail(const Step& step, int micro_batch, Place place)
    const {
  if (step.failure == place && step.failing_rank == world_.rank() &&
      step.failing_micro_batch == micro_batch) {
    throw PlannedFailure(step.failure_text());
  }
}

void ShardedTraining::pause() {
  if (draw(own_, 1000) < static_cast<uint64_t>(settings_.pauses)) {
    std::this_thread::sleep_for(std::chrono::microseconds(draw(own_, 300)));
  } else if (draw(own_, 10) == 0) {
    std::this_thread::yield();
  }
}

std::string ShardedTraining::where() const {
  return "rank " + std::to_string(world_.rank()) + ", step " +
      std::to_string(step_) + ": ";
}

} // namespace fsdp::detail
