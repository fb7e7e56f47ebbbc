#include "runs.h"

#include "progress.h"

#include <algorithm>
#include <iomanip>
#include <ostream>

namespace row_encoder {

namespace {

fsdp::UnitPolicy units_of(const std::string& name) {
  if (name == "model") {
    return {};
  }
  if (name == "layers") {
    return fsdp::each<torch::nn::TransformerEncoderLayer>();
  }
  return fsdp::named(name);
}

/// Every rank computes on one core, and so does the unsharded run: what differs
/// is the number of ranks alone.
void use_one_core() {
  at::set_num_threads(1);
}

Run train_unsharded(
    const Settings& settings,
    const Dataset& data,
    const OnStep& on_step) {
  Run run;
  use_one_core();
  auto model = build_model(settings.model, settings.seed);
  run.training = train(model, fsdp::World(), data, settings, on_step);
  return run;
}

Run train_sharded(
    int ranks,
    const Settings& settings,
    const Dataset& data,
    const OnStep& on_step) {
  Run run;
  const auto options = fsdp::Options()
                           .units(units_of(settings.units))
                           .strategy(settings.strategy);
  at::get_num_threads(); // torch sets its thread pools up before others start
  fsdp::run_as_threads(ranks, [&](const fsdp::World& world) {
    use_one_core();
    const auto model = build_model(settings.model, settings.seed);
    fsdp::FullyShardedDataParallel net(model, world, options);
    const bool reports = world.rank() == 0;
    auto training =
        train(net, world, data, settings, reports ? on_step : OnStep());
    if (reports) {
      run.training = std::move(training);
      run.peak_gathered_bytes = net.memory().peak_gathered_bytes;
    }
  });
  return run;
}

Run train_one(
    int ranks,
    bool sharded,
    const Settings& settings,
    const Dataset& data,
    std::ostream& log) {
  auto name = !sharded
      ? std::string("unsharded")
      : std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks");
  Progress progress(name, settings.steps);
  const auto on_step = [&](const Step& step) {
    progress.show(step);
    log << name << "," << step.number << "," << step.learning_rate << ","
        << step.loss << "\n";
  };
  auto run = sharded ? train_sharded(ranks, settings, data, on_step)
                     : train_unsharded(settings, data, on_step);
  run.name = std::move(name);
  run.ranks = ranks;
  run.sharded = sharded;
  return run;
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

std::vector<Run>
run_all(const Settings& settings, const Dataset& data, std::ostream& log) {
  log << "run,step,learning_rate,loss\n" << std::setprecision(17);
  std::vector<Run> runs;
  if (settings.compare) {
    runs.push_back(train_one(1, /*sharded=*/false, settings, data, log));
    if (settings.ranks > 1) {
      runs.push_back(train_one(1, /*sharded=*/true, settings, data, log));
    }
  }
  runs.push_back(
      train_one(settings.ranks, /*sharded=*/true, settings, data, log));
  return runs;
}

} // namespace row_encoder
