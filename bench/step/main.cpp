// One rank of one side of the step benchmark, in C++. Started by bench/run.py.

#include "common/token_pipe.h"
#include "common/workload.h"
#include "step/sides.h"

#include <torch/torch.h>
#include <CLI/CLI.hpp>

#include <string>

int main(int argc, char** argv) {
  std::string side;
  bench::Workload workload;
  CLI::App app("Answers the conductor with the times of training steps.");
  app.add_option("--side", side, "local, ours or no_shard")->required();
  bench::add_workload_options(app, workload);
  CLI11_PARSE(app, argc, argv);
  return bench::run_program("bench_step", [&] {
    torch::set_num_threads(1);
    bench::with_side(side, workload, [](const auto& step) {
      bench::serve([&](const bench::Token& token) {
        return bench::seconds_of(
            token.count, [] {}, step);
      });
    });
  });
}
