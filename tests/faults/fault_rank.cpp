// One rank of a job in which something goes wrong: fault_rank MODE KEY=VALUE...
//
// It says on stdout what happens, in lines that job.h reads. Status: 0 when all
// went well, 3 after an error that names a failure of the job, 1 after others.

#include "faults/rank_tools.h"

#include <fsdp/fsdp.h>

#include <torch/torch.h>

#include <chrono>
#include <climits>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

/// Where the victim of the job meets its end, by a signal, once the test has
/// made the file "strike".
class Fate {
 public:
  void set_step(int step) { step_ = step; }

  void at(const std::string& place) {
    if (argument_or("victim", "") != std::to_string(own_rank()) ||
        argument_or("place", "") != place || step_ != kStep ||
        std::exchange(is_met_, true)) {
      return;
    }
    say("is at its fate");
    await_file("strike");
    say("struck " + now_ms());
    ::raise(number("signal"));
  }

 private:
  static constexpr int kStep = 2;
  int step_ = kStep; // start-up counts, too
  bool is_met_ = false;
};
Fate fate;

struct BlockImpl : nn::Module {
  explicit BlockImpl(bool with_fate) : has_fate(with_fate) {}

  at::Tensor forward(const at::Tensor& x) {
    if (has_fate) {
      fate.at("forward");
    }
    auto y = linear(x).tanh();
    if (has_fate && y.requires_grad()) {
      y.register_hook([](const at::Tensor& gradient) {
        fate.at("backward");
        return gradient;
      });
    }
    return y;
  }

  nn::Linear linear = register_module("linear", nn::Linear(16, 16));
  bool has_fate;
};
TORCH_MODULE(Block);

struct ModelImpl : nn::Module {
  ModelImpl() {
    for (int i = 0; i < 4; ++i) {
      blocks->push_back(Block(/*with_fate=*/i == 1));
    }
    blocks->at<BlockImpl>(1).linear->weight.register_hook(
        [](const at::Tensor& gradient) {
          fate.at("gradient");
          return gradient;
        });
  }

  at::Tensor forward(const at::Tensor& x) { return head(blocks->forward(x)); }

  nn::Sequential blocks = register_module("blocks", nn::Sequential());
  nn::Linear head = register_module("head", nn::Linear(16, 1));
};
TORCH_MODULE(Model);

UnitPolicy each_block() {
  return UnitPolicy(
      {.description = "each block",
       .match = [](const UnitPolicy::Candidate& candidate) {
         fate.at("making of the net");
         return dynamic_cast<const BlockImpl*>(&candidate.module) == nullptr
             ? std::nullopt
             : std::make_optional(UnitOptions());
       }});
}

/// All that a program has of a job; what it has not come to is null.
struct Training {
  using Net = FullyShardedDataParallel<ModelImpl>;
  using Optimizer = torch::optim::Adam;

  void start() {
    fate.at("start");
    world = init();
    fate.at("after start");
    torch::manual_seed(1);
    net = std::make_unique<Net>(Model(), *world, Options().units(each_block()));
    optimizer = std::make_unique<Optimizer>(net->parameters());
  }

  at::Tensor forward() const {
    // With a gradient of its own, so that backward reads all weights.
    return (*net)(torch::ones({8, 16}).requires_grad_()).square().mean();
  }

  void step() {
    fate.at("between steps");
    where = "forward";
    auto loss = forward();
    fate.at("before backward");
    where = "backward";
    loss.backward();
    where = "optimizer";
    fate.at("before the optimizer");
    optimizer->step();
    optimizer->zero_grad();
  }

  void run() {
    start();
    for (int i = 0; i < number("steps"); ++i) {
      fate.set_step(i);
      step();
      if (i == 0) {
        say("trains");
      }
    }
    where = "shutdown";
    world->shutdown();
  }

  void end() {
    optimizer.reset();
    net.reset();
    world.reset();
  }

  std::string where = "start";
  std::optional<World> world;
  std::unique_ptr<Net> net;
  std::unique_ptr<Optimizer> optimizer;
};

/// What the objects of the job leave in this process.
void say_what_is_left(int descriptors_before) {
  const auto left = [&] { return open_descriptors() - descriptors_before; };
  // Over Gloo a process keeps its connection to the store, which rank 0 serves.
  const bool over_gloo =
      std::getenv("LIBFSDP_BACKEND") == std::string_view("gloo");
  const int kept = !over_gloo ? 0 : own_rank() != 0 ? 1 : INT_MAX;
  for (int i = 0; i < 200 && left() > kept; ++i) { // threads of Gloo end later
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  say("left " + std::to_string(left()) + " descriptors, " +
      std::to_string(views_of_shared_memory()) + " views");
}

int train_mode() {
  meet();
  const int descriptors = open_descriptors();
  Training training;
  const auto failure = failure_of([&] { training.run(); });
  const int status = status_of(failure, training.where);
  if (failure && training.net != nullptr) {
    const auto again = failure_of([&] { training.forward(); });
    say("again " + one_line(again.value_or("no error")));
  }
  training.end();
  say_what_is_left(descriptors);
  return status;
}

void say_what_a_fork_can(const Training& training) {
  say("child " + std::to_string(::getpid()) + " has " +
      std::to_string(views_of_shared_memory()) + " views");
  try {
    training.forward();
    say("child can compute");
  } catch (const c10::Error& error) {
    say("child can not compute: " + one_line(error.what_without_backtrace()));
  }
}

/// The victim forks a child that outlives it.
int fork_mode() {
  meet();
  Training training;
  training.start();
  training.step();
  if (own_rank() == number("victim") && ::fork() == 0) {
    ::alarm(60); // whatever happens
    say_what_a_fork_can(training);
    training.end();
    say("child has let go");
    await_file("end");
    ::_exit(0);
  }
  return status_of(
      failure_of([&] {
        for (int i = 0; true; ++i) {
          training.step();
          if (i == 100) {
            say("goes on");
          }
        }
      }),
      training.where);
}

/// Stays as it is after two steps, for a look at its memory.
int hold_mode() {
  meet();
  const auto world = init();
  torch::manual_seed(1);
  nn::Sequential model;
  constexpr int kUnits = 8;
  for (int i = 0; i < kUnits; ++i) {
    model->push_back(nn::Linear(512, 512));
  }
  auto options = Options().units(each<nn::Linear>());
  if (argument("compute") == "bfloat16") {
    options.mixed_precision({.param_dtype = at::kBFloat16});
  }
  FullyShardedDataParallel net(model, world, options);
  torch::optim::SGD optimizer(net.parameters(), 1e-3);
  for (int step = 0; step < 2; ++step) {
    net(torch::ones({4, 512})).sum().backward();
    optimizer.step();
  }
  const auto memory = net.memory();
  say("holds " + std::to_string(memory.whole_model_bytes) + " " +
      std::to_string(memory.shard_bytes));
  await_file("end");
  world.shutdown();
  return 0;
}

/// Zeros that take no memory until they are written.
at::Tensor untouched(int64_t numel) {
  const auto bytes = static_cast<size_t>(numel) * sizeof(at::BFloat16);
  void* const memory = ::mmap(
      nullptr,
      bytes,
      PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
      -1,
      0);
  TORCH_CHECK(memory != MAP_FAILED, "no room for ", bytes, " bytes");
  return torch::from_blob(
      memory,
      {numel},
      [bytes](void* begin) { ::munmap(begin, bytes); },
      at::kBFloat16);
}

/// Makes a net whose whole weights take `megabytes` MiB while they compute,
/// four times as much as at rest.
int construct_mode() {
  // Should memory be taken in spite of all, this is the process to kill.
  std::ofstream("/proc/self/oom_score_adj") << 1000;
  meet();
  if (const int limit = std::stoi(argument_or("file_megabytes", "0"))) {
    const auto bytes = static_cast<rlim_t>(limit) << 20;
    const rlimit limits{bytes, bytes};
    ::setrlimit(RLIMIT_FSIZE, &limits);
  }
  const auto world = init();
  constexpr int64_t kUnits = 4;
  const int64_t numel =
      (static_cast<int64_t>(number("megabytes")) << 20) / 8 / kUnits;
  ShardedTensors::NamedUnits units;
  for (int64_t i = 0; i < kUnits; ++i) {
    const auto name = "unit" + std::to_string(i);
    units.push_back(
        {name, {{name + ".weight", untouched(numel).requires_grad_()}}});
  }
  const auto failure = failure_of([&] {
    const ShardedTensors net(
        std::move(units),
        world,
        Options().mixed_precision({.param_dtype = at::kDouble}));
  });
  return status_of(failure, "construction");
}

const std::map<std::string, int (*)()> kModes = {
    {"batches", batches_mode},
    {"branches", branches_mode},
    {"construct", construct_mode},
    {"fork", fork_mode},
    {"hold", hold_mode},
    {"idle", idle_mode},
    {"train", train_mode},
};

} // namespace
} // namespace fsdp::testing

int main(int count, char** words) {
  try {
    fsdp::testing::set_arguments(count - 2, words + 2);
    return fsdp::testing::kModes.at(words[1])();
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
    return 1;
  }
}
