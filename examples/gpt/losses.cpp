// Trains a small GPT on random tokens, sharded over the processes of the job,
// and prints its losses as one line of JSON, to be compared with another
// program's:
//   fsdp run -n 2 --no-prefix -- gpt_losses --steps 20

#include "gpt.h"

#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <span>
#include <string>
#include <vector>

namespace gpt {
namespace {

struct Settings {
  ModelOptions model;
  int64_t batch = 2;   // rows per rank
  int64_t tokens = 16; // of a row
  int64_t steps = 20;
  uint64_t seed = 1;
  double learning_rate = 1e-3;
  bool units = true;
};

void add_options(CLI::App& app, Settings& settings) {
  const auto size = CLI::Range(1, 1 << 20);
  const auto add = [&](const char* name, auto& value, const char* help) {
    app.add_option(name, value, help)->check(size);
  };
  add("--layers", settings.model.layers, "Transformer blocks");
  add("--width", settings.model.width, "Width of a token");
  add("--heads", settings.model.heads, "Attention heads");
  add("--vocabulary", settings.model.vocabulary, "Different tokens");
  add("--batch", settings.batch, "Rows per rank and step");
  add("--tokens", settings.tokens, "Tokens of a row");
  add("--steps", settings.steps, "Optimizer steps");
  app.add_option("--seed", settings.seed, "Of weights and tokens");
  app.add_option("--lr", settings.learning_rate, "Learning rate");
  app.add_flag(
      "--units,!--no-units",
      settings.units,
      "Each block is a unit of its own (default), or the whole model is one");
}

void check_heads(const ModelOptions& model) {
  if (model.width % model.heads != 0) {
    throw CLI::ValidationError(
        "--width " + std::to_string(model.width) +
        " is not divisible by --heads " + std::to_string(model.heads));
  }
}

/// What is random, in the order in which it is drawn. All ranks draw the same.
struct Start {
  GPT model{nullptr};
  std::vector<at::Tensor> tokens; // by step: (ranks * batch, tokens + 1)
};

Start draw(const Settings& settings, int ranks) {
  torch::manual_seed(settings.seed);
  Start start;
  start.model = GPT(settings.model);
  for (int64_t step = 0; step < settings.steps; ++step) {
    start.tokens.push_back(torch::randint(
        settings.model.vocabulary,
        {ranks * settings.batch, settings.tokens + 1},
        torch::kLong));
  }
  return start;
}

/// The sum of all values as integers of their bits: equal only for equal bits.
int64_t fingerprint(const std::vector<at::Tensor>& tensors) {
  int64_t sum = 0;
  for (const auto& tensor : tensors) {
    sum += tensor.detach().view(torch::kInt).sum(torch::kLong).item<int64_t>();
  }
  return sum;
}

struct Training {
  std::vector<double> losses;  // by step, of this rank's rows
  std::vector<double> seconds; // by step
};

Training
train(const Start& start, const fsdp::World& world, const Settings& settings) {
  fsdp::Options options;
  if (settings.units) {
    options.units(fsdp::each<Block>());
  }
  fsdp::FullyShardedDataParallel net(start.model, world, options);
  // eps: see tests/interop/fsdp2_losses.py.
  torch::optim::AdamW optimizer(
      net.parameters(),
      torch::optim::AdamWOptions(settings.learning_rate)
          .betas({0.9, 0.999})
          .eps(1e-4)
          .weight_decay(0.01));
  Training training;
  for (const auto& all : start.tokens) {
    const auto begin = std::chrono::steady_clock::now();
    const auto mine =
        all.narrow(0, world.rank() * settings.batch, settings.batch);
    auto loss = next_token_loss(net(mine.narrow(1, 0, settings.tokens)), mine);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    training.losses.push_back(loss.item<double>());
    const std::chrono::duration<double> took =
        std::chrono::steady_clock::now() - begin;
    training.seconds.push_back(took.count());
  }
  return training;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void average_over_ranks(const fsdp::World& world, std::vector<double>& values) {
  const auto bytes = std::as_writable_bytes(std::span(values));
  world.communicator()
      .all_reduce(
          bytes, fsdp::DType::kFloat64, fsdp::ReduceOp::kSum, "sum of losses")
      ->wait();
  for (auto& value : values) {
    value /= world.size();
  }
}

nlohmann::json run(const fsdp::World& world, const Settings& settings) {
  const auto start = draw(settings, world.size());
  nlohmann::json result;
  result["weights"] = fingerprint(start.model->parameters());
  result["tokens"] = fingerprint(start.tokens);
  auto training = train(start, world, settings);
  average_over_ranks(world, training.losses);
  result["losses"] = training.losses;
  result["step_ms"] = 1000 * median(training.seconds);
  return result;
}

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Prints the losses of a small GPT that is trained with shards.");
  app.option_defaults()->always_capture_default();
  add_options(app, settings);
  try {
    app.parse(argc, argv);
    check_heads(settings.model);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  try {
    torch::set_num_threads(1); // as in Python
    const auto world = fsdp::init();
    const auto result = run(world, settings);
    if (world.rank() == 0) {
      std::cout << result << std::endl;
    }
    world.shutdown();
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << "gpt_losses: " << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "gpt_losses: " << error.what() << std::endl;
  }
  return 1;
}

} // namespace
} // namespace gpt

int main(int argc, char** argv) {
  return gpt::main(argc, argv);
}
