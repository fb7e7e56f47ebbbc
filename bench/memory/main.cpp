// One rank of the memory benchmark. Started by bench/run.py, which asks once,
// for "state".

#include "common/token_pipe.h"
#include "common/workload.h"
#include "memory/state_bytes.h"

#include <fsdp/fsdp.h>

#include <torch/torch.h>
#include <CLI/CLI.hpp>

int main(int argc, char** argv) {
  bench::Workload workload;
  CLI::App app("Answers the conductor with what training holds in memory.");
  bench::add_workload_options(app, workload);
  CLI11_PARSE(app, argc, argv);
  return bench::run_program("bench_memory", [&] {
    torch::set_num_threads(1);
    const auto world = fsdp::init();
    bench::serve([&](const bench::Token& /*token*/) {
      return bench::measure_state(workload, world);
    });
    world.shutdown();
  });
}
