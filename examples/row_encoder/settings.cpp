#include "settings.h"

#include <CLI/CLI.hpp>

#include <map>

namespace row_encoder {

namespace {

constexpr const char* kExamples = R"(Examples:
  Two ranks, each with half of the parameters, gradients and optimizer state:
    fsdp run -n 2 -- row_encoder --data digits.csv
  The same training without shards, on one rank and on four, compared:
    fsdp run -n 4 -- row_encoder --data digits.csv --compare
  A larger model for a few steps, on one rank:
    row_encoder --data digits.csv --d-model 512 --layers 12 --steps 5
  Plain data parallel instead, with the loss of every step in a file:
    fsdp run -n 2 -- row_encoder --data digits.csv --strategy no-shard \
      --log losses.csv)";

const std::map<std::string, fsdp::Strategy> kStrategies = {
    {"full-shard", fsdp::Strategy::kFullShard},
    {"shard-grad-op", fsdp::Strategy::kShardGradOp},
    {"no-shard", fsdp::Strategy::kNoShard}};

std::vector<std::string> strategy_names() {
  std::vector<std::string> names;
  for (const auto& [name, strategy] : kStrategies) {
    names.push_back(name);
  }
  return names;
}

void add_model_options(CLI::App& app, ModelOptions& model) {
  const CLI::Range size(1, 65536);
  app.add_option("--d-model", model.d_model, "Width of a token")->check(size);
  app.add_option("--layers", model.layers, "Transformer layers")->check(size);
  app.add_option("--heads", model.heads, "Attention heads")->check(size);
  app.add_option("--ff", model.feed_forward, "Width of the feed-forward layer")
      ->check(size);
}

void add_training_options(CLI::App& app, Settings& settings) {
  app.add_option(
         "--data",
         settings.data,
         "Table of pixels and labels (CSV);\n"
         "scripts/setup.sh puts one at build/data/digits.csv")
      ->required()
      ->check(CLI::ExistingFile);
  app.add_option("--batch", settings.batch, "Rows of a step, over all ranks")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--steps", settings.steps, "Optimizer steps")
      ->check(CLI::Range(1, 1 << 30));
  app.add_option("--lr", settings.learning_rate, "Highest learning rate")
      ->check(CLI::Range(1e-12, 1e3));
  app.add_option("--seed", settings.seed, "Of weights and batches");
}

void add_sharding_options(CLI::App& app, Settings& settings) {
  app.add_option(
      "--units",
      settings.units,
      "What is gathered together: each of the transformer\n"
      "'layers', the whole 'model', or the modules that a\n"
      "pattern names, such as 'encoder.layers.*'");
  app.add_option_function<std::string>(
         "--strategy",
         [&settings](const std::string& name) {
           settings.strategy = kStrategies.at(name);
         },
         "What ranks share out: parameters, gradients and\n"
         "optimizer state (full-shard), the same but with\n"
         "weights whole from forward to backward\n"
         "(shard-grad-op), or nothing (no-shard)")
      ->check(CLI::IsMember(strategy_names()))
      ->default_str(name_of(settings.strategy));
}

void add_output_options(CLI::App& app, Settings& settings) {
  app.add_option(
      "--log", settings.log, "File for the loss of every step (CSV)");
  app.add_option("--summary", settings.summary, "File for all figures (JSON)");
  auto* compare = app.add_flag(
      "--compare",
      settings.compare,
      "Train without shards and on one rank as well, and\n"
      "fail unless losses and memory are right");
  app.add_option(
         "--tolerance",
         settings.tolerance,
         "Largest relative difference of the losses")
      ->needs(compare)
      ->check(CLI::Range(0.0, 1.0));
  app.add_option(
         "--min-accuracy", settings.min_accuracy, "Least held-out accuracy")
      ->needs(compare)
      ->check(CLI::Range(0.0, 1.0));
}

void check_divisible(
    const std::string& what,
    int64_t number,
    const std::string& by,
    int64_t divisor,
    const std::string& why) {
  if (number % divisor != 0) {
    const auto below = number / divisor * divisor;
    throw UsageError(
        what + " " + std::to_string(number) + " is not divisible by " + by +
        " " + std::to_string(divisor) + ": " + why + ". Use " +
        (below > 0 ? std::to_string(below) + " or " : "") +
        std::to_string(below + divisor) + ".");
  }
}

} // namespace

std::optional<Settings> parse_settings(int argc, char** argv) {
  Settings settings;
  CLI::App app(
      "Trains a row encoder on handwritten digits, sharded over the ranks of\n"
      "the job: start it with fsdp run, torchrun, mpirun or srun.");
  app.option_defaults()->always_capture_default()->take_last();
  app.footer(kExamples);
  add_training_options(app, settings);
  add_model_options(app, settings.model);
  add_sharding_options(app, settings);
  add_output_options(app, settings);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    app.exit(help);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  check_divisible(
      "--d-model",
      settings.model.d_model,
      "--heads",
      settings.model.heads,
      "every head takes an equal part");
  return settings;
}

void check_fits(
    const Settings& settings,
    int ranks,
    int64_t train_rows,
    int64_t held_out_rows) {
  check_divisible(
      "--batch",
      settings.batch,
      "the number of ranks,",
      ranks,
      "every rank takes an equal part");
  if (settings.batch > train_rows) {
    throw UsageError(
        "--batch " + std::to_string(settings.batch) +
        " is more than the rows to train on, " + std::to_string(train_rows) +
        ".");
  }
  if (ranks > held_out_rows) {
    throw UsageError(
        "the number of ranks, " + std::to_string(ranks) +
        ", is more than the held-out rows, " + std::to_string(held_out_rows) +
        ", of which every rank takes a part.");
  }
}

std::string name_of(fsdp::Strategy strategy) {
  for (const auto& [name, each] : kStrategies) {
    if (each == strategy) {
      return name;
    }
  }
  return "unknown";
}

} // namespace row_encoder
