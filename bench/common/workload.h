#pragma once

#include "gpt.h"

#include <torch/torch.h>
#include <CLI/CLI.hpp>

#include <cstdint>

namespace bench {

/// A GPT and the batch of one rank. The conductor passes the sizes to every
/// side, in C++ and in Python alike.
struct Workload {
  gpt::ModelOptions model;
  int64_t batch = 1;
  int64_t tokens = 32; // of a row
};

/// Options --layers, --width, --heads, --vocabulary, --batch and --tokens.
void add_workload_options(CLI::App& app, Workload& workload);

/// The model with the same weights on all ranks.
gpt::GPT make_model(const Workload& workload);

/// Of this rank: (batch, tokens + 1).
at::Tensor make_tokens(const Workload& workload, int rank);

constexpr double kLearningRate = 1e-4;

} // namespace bench
