#include "runs.h"

#include "progress.h"

#include <algorithm>
#include <iomanip>
#include <ostream>

namespace row_encoder {

namespace {

constexpr const char* kUnsharded = "unsharded";

fsdp::UnitPolicy units_of(const std::string& name) {
  if (name == "model") {
    return {};
  }
  if (name == "layers") {
    return fsdp::each<torch::nn::TransformerEncoderLayer>();
  }
  return fsdp::named(name);
}

std::string name_of_run(const fsdp::World& world) {
  return std::to_string(world.size()) +
      (world.size() == 1 ? " rank" : " ranks");
}

Run train_unsharded(const Job& job, const OnStep& on_step) {
  auto model = build_model(job.settings.model, job.settings.seed);
  Run run;
  run.name = kUnsharded;
  run.training = train(model, fsdp::World(), job.data, job.settings, on_step);
  return run;
}

/// `world` is that of the job, or one of this rank alone.
Run train_sharded(
    const fsdp::World& world,
    const Job& job,
    const OnStep& on_step) {
  const auto options = fsdp::Options()
                           .units(units_of(job.settings.units))
                           .strategy(job.settings.strategy);
  const auto model = build_model(job.settings.model, job.settings.seed);
  fsdp::FullyShardedDataParallel net(model, world, options);
  Run run;
  run.name = name_of_run(world);
  run.ranks = world.size();
  run.sharded = true;
  run.training = train(net, world, job.data, job.settings, on_step);
  run.peak_gathered_bytes = net.memory().peak_gathered_bytes;
  return run;
}

/// Rank 0 trains by itself. The others wait for each of its steps: so none
/// waits for longer than a step, and they learn at once when it fails.
Run train_alone(const Job& job, bool sharded, std::ostream& log) {
  if (job.world.rank() != 0) {
    for (int64_t step = 0; step < job.settings.steps; ++step) {
      job.world.barrier();
    }
    return {};
  }
  const fsdp::World alone;
  Progress progress(
      sharded ? name_of_run(alone) : kUnsharded, job.settings.steps, log);
  const auto on_step = [&](const Step& step) {
    progress.add(step);
    job.world.barrier();
  };
  return sharded ? train_sharded(alone, job, on_step)
                 : train_unsharded(job, on_step);
}

Run train_together(const Job& job, std::ostream& log) {
  if (job.world.rank() != 0) {
    return train_sharded(job.world, job, OnStep());
  }
  Progress progress(name_of_run(job.world), job.settings.steps, log);
  return train_sharded(
      job.world, job, [&](const Step& step) { progress.add(step); });
}

} // namespace

double Run::median_step_seconds() const {
  std::vector<double> seconds;
  for (const auto& step : training.steps) {
    seconds.push_back(step.seconds);
  }
  const auto middle = seconds.begin() + seconds.size() / 2;
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

std::vector<Run> train_all(const Job& job, std::ostream& log) {
  log << "run,step,learning_rate,loss\n" << std::setprecision(17);
  std::vector<Run> runs;
  if (job.settings.compare) {
    runs.push_back(train_alone(job, /*sharded=*/false, log));
    if (job.world.size() > 1) {
      runs.push_back(train_alone(job, /*sharded=*/true, log));
    }
  }
  runs.push_back(train_together(job, log));
  return runs;
}

} // namespace row_encoder
