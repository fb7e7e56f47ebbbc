#include "common/workload.h"

namespace bench {

void add_workload_options(CLI::App& app, Workload& workload) {
  const auto size = CLI::Range(1, 1 << 20);
  app.add_option("--layers", workload.model.layers)->check(size);
  app.add_option("--width", workload.model.width)->check(size);
  app.add_option("--heads", workload.model.heads)->check(size);
  app.add_option("--vocabulary", workload.model.vocabulary)->check(size);
  app.add_option("--batch", workload.batch)->check(size);
  app.add_option("--tokens", workload.tokens)->check(size);
}

gpt::GPT make_model(const Workload& workload) {
  torch::manual_seed(1);
  return gpt::GPT(workload.model);
}

at::Tensor make_tokens(const Workload& workload, int rank) {
  torch::manual_seed(static_cast<uint64_t>(100 + rank));
  return torch::randint(
      workload.model.vocabulary,
      {workload.batch, workload.tokens + 1},
      torch::kLong);
}

} // namespace bench
