// Trains a small GPT on random tokens, sharded over ranks that are threads, and
// prints its losses as one line of JSON, to be compared with another program's.

#include "gpt.h"

#include <fsdp/fsdp.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

namespace gpt {
namespace {

struct Settings {
  ModelOptions model;
  int ranks = 2;
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
  add("--ranks", settings.ranks, "Ranks, which are threads here");
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

/// What is random, in the order in which it is drawn: one model, whose values
/// all ranks start from, and the tokens of every step for all ranks.
struct Start {
  std::vector<GPT> models;        // by rank
  std::vector<at::Tensor> tokens; // by step: (ranks * batch, tokens + 1)
};

Start draw(const Settings& settings) {
  Start start;
  for (int rank = 0; rank < settings.ranks; ++rank) {
    torch::manual_seed(settings.seed);
    start.models.emplace_back(settings.model);
  }
  for (int64_t step = 0; step < settings.steps; ++step) {
    start.tokens.push_back(torch::randint(
        settings.model.vocabulary,
        {settings.ranks * settings.batch, settings.tokens + 1},
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

Training train(
    const GPT& model,
    const fsdp::World& world,
    const std::vector<at::Tensor>& tokens,
    const Settings& settings) {
  fsdp::Options options;
  if (settings.units) {
    options.units(fsdp::each<Block>());
  }
  fsdp::FullyShardedDataParallel net(model, world, options);
  // eps: see tests/interop/fsdp2_losses.py.
  torch::optim::AdamW optimizer(
      net.parameters(),
      torch::optim::AdamWOptions(settings.learning_rate)
          .betas({0.9, 0.999})
          .eps(1e-4)
          .weight_decay(0.01));
  Training training;
  for (const auto& all : tokens) {
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

nlohmann::json run(const Settings& settings) {
  const auto start = draw(settings);
  nlohmann::json result;
  result["weights"] = fingerprint(start.models.front()->parameters());
  result["tokens"] = fingerprint(start.tokens);
  std::vector<Training> trainings(start.models.size());
  fsdp::run_as_threads(
      settings.ranks,
      [&](const fsdp::World& world) {
        const auto rank = static_cast<size_t>(world.rank());
        trainings[rank] =
            train(start.models[rank], world, start.tokens, settings);
      },
      std::chrono::seconds(60));
  for (size_t step = 0; step < start.tokens.size(); ++step) {
    double sum = 0;
    for (const auto& training : trainings) {
      sum += training.losses[step];
    }
    result["losses"].push_back(sum / settings.ranks);
  }
  result["step_ms"] = 1000 * median(trainings.front().seconds);
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
    torch::set_num_threads(1); // the ranks are the threads
    std::cout << run(settings) << std::endl;
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "gpt_losses: " << error.what() << "\n";
    return 1;
  }
}

} // namespace
} // namespace gpt

int main(int argc, char** argv) {
  return gpt::main(argc, argv);
}
