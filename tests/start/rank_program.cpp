// One rank of a job, as the tests start it: start_rank_program MODE [ARGUMENT].
// Prints what it finds on stdout, and errors on stderr; exits with 1 after one.

#include <fsdp/fsdp.h>

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

using Arguments = std::vector<std::string>;

constexpr int64_t kRows = 12;
constexpr int kSteps = 3;

struct ModelImpl : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(7, 9));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(9, 1));

  at::Tensor forward(const at::Tensor& x) { return second(first(x).tanh()); }
};
TORCH_MODULE(Model);

using Net = fsdp::FullyShardedDataParallel<ModelImpl>;
using Optimizer = torch::optim::AdamW;

Model make_model() {
  torch::manual_seed(1);
  return Model();
}

at::Tensor inputs() {
  return torch::linspace(-1, 1, kRows * 7).view({kRows, 7});
}

at::Tensor loss_of(const at::Tensor& y, const at::Tensor& x) {
  return (y - x.sum(1, true)).square().mean();
}

std::unique_ptr<Optimizer> make_optimizer(const std::vector<at::Tensor>& of) {
  return std::make_unique<Optimizer>(
      of, torch::optim::AdamWOptions(1e-2).eps(1e-4));
}

/// A world of a rank, and what trains in it.
struct Rank {
  explicit Rank(const fsdp::World& of)
      : world(of),
        net(std::make_unique<Net>(
            make_model(),
            of,
            fsdp::Options().units(fsdp::named("first")))),
        optimizer(make_optimizer(net->parameters())) {}

  /// The mean loss over the ranks, of before the step.
  double step() {
    const auto x = inputs().chunk(world->size())[world->rank()];
    auto loss = loss_of((*net)(x), x);
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    auto value = loss.item<double>();
    world->communicator()
        .all_reduce(
            {reinterpret_cast<std::byte*>(&value), sizeof(value)},
            fsdp::DType::kFloat64,
            fsdp::ReduceOp::kSum,
            "loss of the program")
        ->wait();
    return value / world->size();
  }

  std::optional<fsdp::World> world;
  std::unique_ptr<Net> net;
  std::unique_ptr<Optimizer> optimizer;
};

std::vector<double> unsharded_losses() {
  auto model = make_model();
  const auto optimizer = make_optimizer(model->parameters());
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    auto loss = loss_of(model(inputs()), inputs());
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

void say(const fsdp::World& world, const std::string& text) {
  std::ostringstream line;
  line << "rank " << world.rank() << "/" << world.size() << ": " << text
       << "\n";
  std::cout << line.str() << std::flush;
}

void train(Rank& rank) {
  const auto expected = unsharded_losses();
  for (int step = 0; step < kSteps; ++step) {
    const auto loss = rank.step();
    const auto wanted = expected[static_cast<size_t>(step)];
    if (!(std::abs(loss - wanted) <= 1e-6 * std::abs(wanted))) {
      std::ostringstream text;
      text << "step " << step << ": the loss is " << loss
           << ", but unsharded it is " << wanted;
      throw std::runtime_error(text.str());
    }
  }
  say(*rank.world, "losses agree");
}

// Modes.

void train_mode(const Arguments& /*arguments*/) {
  const auto world = fsdp::init();
  std::ostringstream place;
  place << "local " << world.local_rank() << "/" << world.local_size();
  say(world, place.str());
  Rank rank(world);
  train(rank);
  say(world,
      "strategy " +
          std::to_string(
              static_cast<int>(rank.net->describe().units.front().strategy)));
}

void shutdown_mode(const Arguments& /*arguments*/) {
  const auto world = fsdp::init();
  Rank rank(world);
  train(rank);
  world.shutdown();
}

/// Destroys in the order of the letters: w(orld), n(et), o(ptimizer), m(odel).
void destroy_in_order(const std::string& order) {
  auto model = make_model();
  std::optional<fsdp::World> world = fsdp::init();
  std::optional<Net> net;
  net.emplace(model, *world, fsdp::Options().units(fsdp::named("first")));
  auto optimizer = make_optimizer(net->parameters());
  const auto x = inputs().chunk(world->size())[world->rank()];
  loss_of((*net)(x), x).backward();
  optimizer->step();
  say(*world, "destroys " + order);
  for (const char what : order) {
    switch (what) {
      case 'w':
        world.reset();
        break;
      case 'n':
        net.reset();
        break;
      case 'o':
        optimizer.reset();
        break;
      default:
        model = Model(nullptr);
    }
  }
}

/// One world after another.
void destroy_mode(const Arguments& arguments) {
  for (const auto& order : arguments) {
    destroy_in_order(order);
  }
  std::cout << "destroyed all\n";
}

/// Everything lives until statics are destroyed.
void statics_mode(const Arguments& /*arguments*/) {
  static std::unique_ptr<Rank> rank;
  rank = std::make_unique<Rank>(fsdp::init());
  train(*rank);
}

/// Rank 1 throws in its loop, outside of the net.
void throw_mode(const Arguments& /*arguments*/) {
  Rank rank(fsdp::init());
  for (int step = 0; step < 100; ++step) {
    if (step == 2 && rank.world->rank() == 1) {
      throw std::runtime_error("the disk is full");
    }
    rank.step();
  }
}

/// The same, and nobody catches it.
void terminate_mode(const Arguments& arguments) {
  std::thread([&] { throw_mode(arguments); }).join();
}

/// Rank 1 has fewer batches, and ends as if all were well.
void unequal_mode(const Arguments& arguments) {
  const auto world = fsdp::init();
  Rank rank(world);
  const int steps = world.rank() == 1 ? 2 : 3;
  for (int step = 0; step < steps; ++step) {
    rank.step();
  }
  if (!arguments.empty()) {
    world.shutdown();
  }
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

void twice_mode(const Arguments& /*arguments*/) {
  const auto world = fsdp::init();
  say(world, error_of([] { fsdp::init(); }));
  world.barrier();
  Rank first(world);
  train(first);
  world.shutdown();
  const auto again = fsdp::init();
  Rank second(again);
  train(second);
  again.shutdown();
  world.shutdown();
}

void after_shutdown_mode(const Arguments& /*arguments*/) {
  const auto world = fsdp::init();
  Rank rank(world);
  const auto part = world.split(world.rank());
  rank.step();
  const auto x = inputs().chunk(world.size())[world.rank()];
  auto loss = loss_of((*rank.net)(x), x);
  world.shutdown();
  world.shutdown();
  const std::map<std::string, std::function<void()>> calls = {
      {"barrier", [&] { world.barrier(); }},
      {"split", [&] { world.split(0); }},
      {"part", [&] { part.barrier(); }},
      {"communicator", [&] { world.communicator(); }},
      {"forward", [&] { (*rank.net)(x); }},
      {"whole", [&] { auto whole = rank.net->whole_parameters(); }},
      {"backward", [&] { loss.backward(); }}};
  for (const auto& [name, call] : calls) {
    say(world, name + ": " + error_of(call));
  }
}

/// Rank 1 waits before it comes, or never comes.
void late_mode(const Arguments& arguments) {
  if (std::getenv("RANK") == std::string("1")) {
    ::usleep(static_cast<useconds_t>(std::stod(arguments.at(0)) * 1e6));
  }
  train_mode({});
}

/// Takes memfd_create from this process, as a sandbox may.
void refuse_memfd() {
  std::array<sock_filter, 4> filter = {{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog program{filter.size(), filter.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    throw std::runtime_error("can not filter system calls");
  }
}

/// Trains without memfd_create on all ranks, or on one.
void no_memfd_mode(const Arguments& arguments) {
  if (arguments.empty() || std::getenv("RANK") == arguments.at(0)) {
    refuse_memfd();
  }
  train_mode({});
}

/// Rank 1 fails in the first round of torchrun.
void restart_mode(const Arguments& /*arguments*/) {
  Rank rank(fsdp::init());
  rank.step();
  const std::string round = std::getenv("TORCHELASTIC_RESTART_COUNT");
  if (round == "0" && rank.world->rank() == 1) {
    throw std::runtime_error("the disk is full");
  }
  rank.step();
  say(*rank.world, "went on in round " + round);
}

/// A split of the world by the parity of the rank.
void split_mode(const Arguments& /*arguments*/) {
  const auto world = fsdp::init();
  const auto half = world.split(world.rank() % 2);
  Rank rank(half);
  train(rank);
  say(world,
      "half " + std::to_string(half.rank()) + "/" +
          std::to_string(half.size()) + " local " +
          std::to_string(half.local_rank()) + "/" +
          std::to_string(half.local_size()));
}

/// The calls of InitOptions instead of variables.
void options_mode(const Arguments& arguments) {
  fsdp::InitOptions options;
  options.backend = arguments.at(0);
  options.timeout = std::chrono::seconds(20);
  const auto world = fsdp::init(options);
  Rank rank(world);
  train(rank);
}

const std::map<std::string, void (*)(const Arguments&)> kModes = {
    {"after_shutdown", after_shutdown_mode},
    {"destroy", destroy_mode},
    {"late", late_mode},
    {"no_memfd", no_memfd_mode},
    {"options", options_mode},
    {"restart", restart_mode},
    {"shutdown", shutdown_mode},
    {"split", split_mode},
    {"statics", statics_mode},
    {"terminate", terminate_mode},
    {"throw", throw_mode},
    {"train", train_mode},
    {"twice", twice_mode},
    {"unequal", unequal_mode},
};

} // namespace

int main(int count, char** words) {
  const Arguments arguments(words + std::min(count, 1), words + count);
  const auto error = error_of([&] {
    kModes.at(arguments.at(0))({arguments.begin() + 1, arguments.end()});
  });
  if (error != "no error") {
    std::cerr << "error: " << error << std::endl;
    return 1;
  }
  return 0;
}
