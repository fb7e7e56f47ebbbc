// Ranks that take different paths through a model, or through its batches.

#include "faults/rank_tools.h"

#include <fsdp/fsdp.h>

#include <torch/torch.h>

#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

constexpr int64_t kRows = 4;
constexpr int64_t kWidth = 6;

at::Tensor inputs_of(int rank) {
  return torch::linspace(-1, 1, kRows * kWidth).view({kRows, kWidth}) +
      0.1 * rank;
}

void train(
    const std::vector<at::Tensor>& parameters,
    const std::function<at::Tensor()>& loss) {
  constexpr int kSteps = 3;
  torch::optim::SGD optimizer(parameters, 0.5);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    loss().backward();
    optimizer.step();
  }
}

/// The mean over the ranks of their losses.
at::Tensor mean_loss(const std::function<at::Tensor(int rank)>& loss) {
  auto sum = torch::zeros({});
  for (int rank = 0; rank < all_ranks(); ++rank) {
    sum = sum + loss(rank);
  }
  return sum / all_ranks();
}

void expect_same(ShardedModule& net, const nn::Module& expected) {
  const auto whole = net.whole_parameters();
  const auto wanted = expected.named_parameters();
  for (const auto& [name, parameter] : net.named_parameters()) {
    if (!torch::allclose(parameter, wanted[name], 1e-5, 1e-6)) {
      std::ostringstream text;
      text << name << " is " << parameter << ", but unsharded it is "
           << wanted[name];
      throw std::runtime_error(text.str());
    }
  }
  say("agrees with unsharded training");
}

// A part of the model that ranks may skip.

struct IdleImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x, const std::string& how) {
    if (how == "skip") {
      return head(x.tanh());
    }
    // With data for a part of the batch, which may be no rows at all.
    const auto rows = how == "empty batch" ? 0 : kRows / 2;
    const auto encoded = encoder(x.narrow(0, 0, rows)).tanh();
    const auto others = x.narrow(0, rows, kRows - rows);
    return head(torch::cat({encoded, others}));
  }

  nn::Linear encoder = register_module("encoder", nn::Linear(kWidth, kWidth));
  nn::Linear head = register_module("head", nn::Linear(kWidth, 1));
};
TORCH_MODULE(Idle);

/// What a rank does with the encoder: only rank 0 has data for it.
std::string use_of_encoder(int rank, const std::string& idle) {
  return rank == 0 ? "call" : idle;
}

template <class Model>
Model make_model() {
  torch::manual_seed(3);
  return Model();
}

// Branches of one depth and size.

struct BranchesImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return head(left(x).tanh() + right(x).sigmoid());
  }

  nn::Linear left = register_module("left", nn::Linear(kWidth, kWidth));
  nn::Linear right = register_module("right", nn::Linear(kWidth, kWidth));
  nn::Linear head = register_module("head", nn::Linear(kWidth, 1));
};
TORCH_MODULE(Branches);

/// Leaves holes of the size of the parameters, so that these have other
/// addresses, and in another order, than on the other ranks.
std::vector<at::Tensor> disturb_addresses() {
  std::vector<at::Tensor> kept;
  for (int i = 0; i < 1000; ++i) {
    auto tensor = torch::ones({kWidth, kWidth});
    if (i % 3 == 0) {
      kept.push_back(tensor);
    }
  }
  return kept;
}

} // namespace

int idle_mode() {
  meet();
  const auto world = init();
  const auto idle = argument("idle");
  FullyShardedDataParallel net(
      make_model<Idle>(), world, Options().units(named("encoder")));
  const int me = world.rank();
  const auto failure = failure_of([&] {
    train(net.parameters(), [&] {
      return net(inputs_of(me), use_of_encoder(me, idle)).square().mean();
    });
    auto reference = make_model<Idle>();
    train(reference->parameters(), [&] {
      return mean_loss([&](int rank) {
        return reference(inputs_of(rank), use_of_encoder(rank, idle))
            .square()
            .mean();
      });
    });
    expect_same(net, *reference);
    world.shutdown();
  });
  return status_of(failure, "training");
}

int branches_mode() {
  meet();
  const auto world = init();
  std::vector<at::Tensor> kept;
  if (world.rank() == 1) {
    kept = disturb_addresses();
  }
  FullyShardedDataParallel net(
      make_model<Branches>(),
      world,
      Options().units(named("left") | named("right")));
  train(net.parameters(), [&] {
    return net(inputs_of(world.rank())).square().mean();
  });
  auto reference = make_model<Branches>();
  train(reference->parameters(), [&] {
    return mean_loss(
        [&](int rank) { return reference(inputs_of(rank)).square().mean(); });
  });
  expect_same(net, *reference);
  world.shutdown();
  return 0;
}

/// Rank 1 has two batches, the others three.
int batches_mode() {
  meet();
  const auto world = init();
  FullyShardedDataParallel net(make_model<Branches>(), world);
  torch::optim::SGD optimizer(net.parameters(), 0.1);
  std::string where;
  const auto failure = failure_of([&] {
    const int batches = world.rank() == 1 ? 2 : 3;
    where = "training";
    for (int i = 0; i < batches; ++i) {
      optimizer.zero_grad();
      net(inputs_of(world.rank())).square().mean().backward();
      optimizer.step();
    }
    where = "evaluation";
    if (argument("then") == "evaluate") {
      const auto whole = net.whole_parameters();
    }
    where = "shutdown";
    world.shutdown();
  });
  return status_of(failure, where);
}

} // namespace fsdp::testing
