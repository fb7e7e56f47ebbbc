// Autocast of the program over sharded weights.

#include "harness/chain.h"

#include <ATen/autocast_mode.h>

namespace fsdp::testing {
namespace {

using at::Tensor;

enum class Cache : uint8_t { kOff, kOn };

/// Autocast to bfloat16 on CPU while it lives. The cache is cleared at the end
/// unless an outer one lives, as torch.autocast does.
class Autocast {
 public:
  explicit Autocast(Cache cache)
      : enabled_(at::autocast::is_autocast_enabled(at::kCPU)),
        cached_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_cache_enabled(cache == Cache::kOn);
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, enabled_);
    at::autocast::set_autocast_cache_enabled(cached_);
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  bool enabled_;
  bool cached_;
};

/// All ranks take the same rows: rounding to 16 bits depends on them.
ParitySettings same_rows() {
  ParitySettings settings;
  settings.batch = Batch::kSame;
  return settings;
}

Tensor autocast_loss(Chain& chain, const Tensor& rows) {
  const auto y = chain.forward(chain.x.index_select(0, rows));
  TORCH_CHECK(y.scalar_type() == at::kBFloat16);
  return y.to(at::kFloat).pow(2).mean();
}

TEST(Autocast, WithACacheThatIsClearedInEachStep) {
  expect_same_training(
      chain_with([](Chain& chain, const Tensor& rows) {
        const Autocast autocast(Cache::kOn);
        return autocast_loss(chain, rows);
      }),
      same_rows());
}

TEST(Autocast, WithACacheOverLayersThatAreUsedTwice) {
  auto settings = same_rows();
  settings.world_sizes = {1}; // all threads share one cache, and clear it
  expect_same_training(
      chain_with([](Chain& chain, const Tensor& rows) {
        const Autocast autocast(Cache::kOn);
        auto y = chain.forward(chain.x.index_select(0, rows));
        y = chain.forward(y);
        return y.to(at::kFloat).pow(2).mean();
      }),
      settings);
}

TEST(Autocast, WithoutACacheOverLayersThatAreUsedTwice) {
  expect_same_training(
      chain_with([](Chain& chain, const Tensor& rows) {
        const Autocast autocast(Cache::kOff);
        auto y = chain.forward(chain.x.index_select(0, rows));
        y = chain.forward(y);
        return y.to(at::kFloat).pow(2).mean();
      }),
      same_rows());
}

TEST(Autocast, WithACacheThatIsNeverCleared) {
  // libtorch keeps the casts of the first step, sharded or not.
  expect_same_training(
      chain_with([](Chain& chain, const Tensor& rows) {
        at::autocast::set_autocast_enabled(at::kCPU, true);
        const auto loss = autocast_loss(chain, rows);
        at::autocast::set_autocast_enabled(at::kCPU, false);
        return loss;
      }),
      same_rows());
  at::autocast::clear_cache();
}

TEST(Autocast, AroundTheWholeTrainingLoop) {
  // Also around backward and the optimizer.
  ChainTraining training;
  training.settings = same_rows();
  training.loss = autocast_loss;
  training.before_step = [](int step, Chain&, ShardedTensors*) {
    at::autocast::set_autocast_enabled(at::kCPU, step >= 0);
    at::autocast::set_autocast_cache_enabled(false);
  };
  expect_same_training(training);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::set_autocast_cache_enabled(true);
}

TEST(Autocast, AroundTheCallOfTheNetOnly) {
  ChainTraining training;
  training.settings = same_rows();
  training.loss = [](Chain& chain, const Tensor& rows) {
    Tensor y;
    {
      const Autocast autocast(Cache::kOff);
      y = chain.forward(chain.x.index_select(0, rows));
    }
    return y.to(at::kFloat).pow(2).mean() + chain.weight(2).pow(2).mean();
  };
  expect_same_training(training);
}

TEST(Autocast, OverValuesThatComeFromWeightsOnly) {
  expect_same_training(
      chain_with([](Chain& chain, const Tensor& rows) {
        const auto x = chain.x.index_select(0, rows);
        auto y = x.clone().requires_grad_();
        const auto input = y;
        {
          const Autocast autocast(Cache::kOff);
          y = chain.forward(y);
        }
        auto normed = chain.weight(0) / chain.weight(0).norm();
        normed = normed.tanh().t().contiguous();
        auto changed = chain.weight(1) * 2;
        changed.mul_(0.5);
        const auto z = x.mm(normed).mm(changed).pow(2).mean();
        const auto penalty = torch::autograd::grad(
            {y.to(at::kFloat).sum()},
            {input},
            {},
            /*retain_graph=*/true,
            /*create_graph=*/true)[0];
        return y.to(at::kFloat).pow(2).mean() + z + penalty.pow(2).mean();
      }),
      same_rows());
}

TEST(Autocast, GraphOverCastsOfChangedWeightsIsAnError) {
  // Casts are not kept but made again, so this is seen; libtorch, which keeps
  // them, goes on with the old weights.
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        const auto loss = net.call([&] {
          const Autocast autocast(Cache::kOff);
          return autocast_loss(chain, rows_of_rank(net.world()));
        });
        {
          const torch::NoGradGuard no_grad;
          for (auto& parameter : chain.parameters()) {
            parameter.mul_(0.5);
          }
        }
        EXPECT_TRUE(fails_with(
            [&] { loss.backward(); }, {"modified by an inplace operation"}));
        const torch::NoGradGuard no_grad;
        for (auto& parameter : chain.parameters()) {
          parameter.mul_(2); // exact
        }
      },
      split_strategies());
}

TEST(Autocast, OverWeightsInBfloat16ChangesNothing) {
  ParitySettings settings;
  settings.options.mixed_precision({.param_dtype = at::kBFloat16});
  const auto plain = chain_with([](Chain& chain, const Tensor& rows) {
    return autocast_loss(chain, rows);
  });
  const auto cast = chain_with([](Chain& chain, const Tensor& rows) {
    const Autocast autocast(Cache::kOff);
    return autocast_loss(chain, rows);
  });
  for (const int world_size : {1, 2, 3, 4}) {
    for (const auto strategy : kAllStrategies) {
      const auto expected =
          train_sharded(plain, settings, world_size, strategy);
      for (const auto& [rank, actual] :
           train_sharded(cast, settings, world_size, strategy)) {
        expect_identical(expected.at(rank), actual);
      }
    }
  }
}

} // namespace
} // namespace fsdp::testing
