// What an operator that reads no parameter costs: measure "plain" without, and
// "in_region" with an open region of a net. Started by bench/run.py.

#include "common/token_pipe.h"

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <stdexcept>

namespace bench {
namespace {

constexpr int kOperators = 20'000;

void run_operators(const at::Tensor& x) {
  for (int i = 0; i < kOperators; ++i) {
    const auto y = x.mul(x);
  }
}

void serve_operator_cost() {
  const auto x = torch::ones({64});
  fsdp::FullyShardedDataParallel net(torch::nn::Linear(64, 64));
  serve([&](const Token& token) {
    const auto work = [&] { run_operators(x); };
    if (token.measure == "plain") {
      return seconds_of(
          token.count, [] {}, work);
    }
    if (token.measure == "in_region") {
      const auto region = net.region();
      return seconds_of(
          token.count, [] {}, work);
    }
    throw std::invalid_argument(
        "expected plain or in_region, but got '" + token.measure + "'.");
  });
}

} // namespace
} // namespace bench

int main() {
  return bench::run_program("bench_operator_cost", [] {
    torch::set_num_threads(1);
    bench::serve_operator_cost();
  });
}
