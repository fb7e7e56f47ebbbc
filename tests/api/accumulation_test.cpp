// How gradients of ranks and of micro-batches are joined.

#include "api/counting_communicator.h"
#include "api/micro_batches.h"
#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <stdexcept>

namespace fsdp::testing {
namespace accumulation {

namespace nn = torch::nn;
using at::Tensor;

constexpr Strategy kStrategies[] = {
    Strategy::kFullShard,
    Strategy::kShardGradOp,
    Strategy::kShardOptimizer,
    Strategy::kNoShard};

void expect_nothing_lost(const std::string& sequence) {
  for (const auto strategy : kStrategies) {
    for (const int size : {1, 2, 3}) {
      SCOPED_TRACE(sequence);
      on_ranks(size, [&](const World& world) {
        expect_micro_batches_add_up(
            sequence, world, Options().strategy(strategy));
      });
    }
  }
}

TEST(Accumulation, EveryOrderOfMicroBatchesGivesTheSum) {
  for (const auto* sequence :
       {"ss", "sss", "ns", "nns", "sns", "nsns", "nnsss"}) {
    expect_nothing_lost(sequence);
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
}

TEST(Accumulation, ForwardMayRunOutsideOfTheGuard) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(seeded(make_linear), world);
    auto first = net.call(constant_loss, 1.0);
    {
      const auto no_sync = net.no_sync();
      first.backward();
    }
    expect_gradients(net, std::nullopt);
    Tensor second;
    {
      const auto no_sync = net.no_sync();
      second = net.call(constant_loss, 2.0);
    }
    second.backward();
    expect_gradients(net, 3.0);
  });
}

TEST(Accumulation, GuardsNestAndMove) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(seeded(make_linear), world);
    {
      auto outer = net.no_sync();
      { const auto inner = net.no_sync(); }
      const auto moved = std::move(outer);
      net.call(constant_loss, 1.0).backward();
      expect_gradients(net, std::nullopt);
    }
    net.call(constant_loss, 2.0).backward();
    expect_gradients(net, 3.0);
  });
}

TEST(Accumulation, NoSyncCommunicatesNoGradients) {
  for (const auto strategy : kStrategies) {
    on_ranks(2, [&](const World& world) {
      auto counter = std::make_shared<CountingCommunicator>(world);
      FullyShardedDataParallel net(
          seeded(make_linear), World(counter), Options().strategy(strategy));
      counter->notes().clear();
      {
        const auto no_sync = net.no_sync();
        for (int i = 0; i < 3; ++i) {
          net.call(constant_loss, 1.0).backward();
        }
      }
      EXPECT_EQ(counter->count("reduce"), 0);
      EXPECT_EQ(counter->count("settlement"), 0);
      EXPECT_GT(net.memory().unreduced_gradient_bytes, 0);
      net.call(constant_loss, 1.0).backward();
      EXPECT_EQ(counter->count("reduce"), 1);
      EXPECT_EQ(net.memory().unreduced_gradient_bytes, 0);
      expect_gradients(net, 4.0);
    });
  }
}

TEST(Accumulation, NoSyncReleasesWeightsBetweenMicroBatches) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(seeded(make_linear), world);
    const auto no_sync = net.no_sync();
    net.call(constant_loss, 1.0).backward();
    EXPECT_EQ(net.memory().gathered_bytes, 0);
    EXPECT_EQ(net.parameters()[0].dim(), 1);
    EXPECT_FALSE(net.parameters()[0].grad().defined());
  });
}

TEST(Accumulation, BothModesEqualOneLargeBatch) {
  ProgramSettings settings;
  settings.world_sizes = {1, 2, 3};
  settings.options.units(each<Block>());
  for (const bool defer : {false, true}) {
    expect_same_program(
        make_network,
        [&](auto& net, Log& log) {
          torch::optim::SGD optimizer(
              net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
          for (int step = 0; step < 3; ++step) {
            for (int micro = 0; micro < 3; ++micro) {
              const auto x = log.mine(wave({kRows, 3}, 0.7 + step + micro));
              if (defer && micro < 2) {
                const auto no_sync = net.no_sync();
                (net(x).pow(2).mean() / 3).backward();
              } else {
                (net(x).pow(2).mean() / 3).backward();
              }
            }
            log.gradients(net);
            optimizer.step();
            optimizer.zero_grad();
          }
          log.parameters(net);
        },
        settings);
  }
}

/// 'n' and 's' as above.
void expect_gradients_apart(const std::string& sequence) {
  const auto make = [] {
    nn::Sequential both(
        nn::Linear(nn::LinearOptions(5, 3).bias(false)),
        nn::Linear(nn::LinearOptions(5, 3).bias(false)));
    return both.ptr();
  };
  for (const auto strategy : kStrategies) {
    for (const int size : {1, 2}) {
      on_ranks(size, [&](const World& world) {
        FullyShardedDataParallel net(
            seeded(make),
            world,
            Options().strategy(strategy).units(each<nn::Linear>()));
        for (const char kind : sequence) {
          std::optional<NoSync> no_sync;
          if (kind == 'n') {
            no_sync.emplace(net.no_sync());
          }
          net.call([&](nn::SequentialImpl& m) {
               // Both views hand on the gradient of the sum, as it is.
               const auto weights = m.parameters();
               const auto both = weights[0].view(15) + weights[1].view(15);
               return (both * torch::ones({15})).sum();
             })
              .backward();
        }
        expect_gradients(net, sequence.size());
      });
    }
  }
}

TEST(Accumulation, GradientsThatShareMemoryAddUpApart) {
  expect_gradients_apart("nns");
  expect_gradients_apart("sss");
}

TEST(Accumulation, DifferentParametersInDifferentMicroBatches) {
  for (const auto strategy : kStrategies) {
    on_ranks(2, [&](const World& world) {
      FullyShardedDataParallel net(
          seeded(make_linear), world, Options().strategy(strategy));
      {
        const auto no_sync = net.no_sync();
        net.call([](auto& m) { return m.weight.sum(); }).backward();
      }
      net.call([](auto& m) { return 2 * m.bias.sum(); }).backward();
      for (const auto& [name, gradient] : whole_gradients(net)) {
        EXPECT_TRUE(at::equal(
            gradient, torch::full_like(gradient, name == "weight" ? 1.0 : 2.0)))
            << name;
      }
    });
  }
}

/// Expects that the gradients of earlier micro-batches were dropped, that the
/// net says so, once, and that a step from its beginning is right.
void expect_dropped(FullyShardedDataParallel<nn::LinearImpl>& net) {
  const auto lost = error_of([&] { net.call(constant_loss, 2.0); });
  EXPECT_TRUE(contains(lost, "waited for a reduction (no_sync)")) << lost;
  EXPECT_TRUE(contains(lost, "zero_grad()")) << lost;
  EXPECT_EQ(net.memory().unreduced_gradient_bytes, 0);
  net->zero_grad();
  {
    const auto no_sync = net.no_sync();
    net.call(constant_loss, 1.0).backward();
  }
  net.call(constant_loss, 2.0).backward();
  expect_gradients(net, 3.0);
}

TEST(Accumulation, AStepCanBeGivenUp) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(seeded(make_linear), world);
    for (const bool fails : {false, true}) {
      {
        const auto no_sync = net.no_sync();
        net.call(constant_loss, 4.0).backward();
      }
      if (fails) {
        EXPECT_NE(
            error_of([&] {
              net.call(
                  [](nn::LinearImpl&) { throw std::runtime_error("bad"); });
            }),
            "");
      }
      net.drop_unreduced_gradients();
      EXPECT_EQ(net.memory().unreduced_gradient_bytes, 0);
      net->zero_grad();
      net.call(constant_loss, 3.0).backward();
      expect_gradients(net, 3.0);
    }
  });
}

TEST(Accumulation, ChangingAFlagWhileGradientsWaitIsRefused) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(seeded(make_linear), world);
    {
      const auto no_sync = net.no_sync();
      net.call(constant_loss, 1.0).backward();
    }
    net->bias.requires_grad_(false);
    const auto error = error_of([&] { net.call(constant_loss, 1.0); });
    EXPECT_TRUE(contains(error, "requires_grad")) << error;
    EXPECT_TRUE(contains(error, "no_sync")) << error;
    net->bias.requires_grad_(true);
    expect_dropped(net);
  });
}

TEST(Accumulation, AFailedForwardDropsEarlierMicroBatchesAndSaysSo) {
  for (const auto strategy : kStrategies) {
    on_ranks(2, [&](const World& world) {
      FullyShardedDataParallel net(
          seeded(make_linear), world, Options().strategy(strategy));
      {
        const auto no_sync = net.no_sync();
        net.call(constant_loss, 1.0).backward();
        EXPECT_THROW(
            net.call([](nn::LinearImpl& linear) {
              (linear.weight * 2).sum();
              throw std::runtime_error("bad data");
            }),
            std::runtime_error);
      }
      expect_dropped(net);
    });
  }
}

TEST(Accumulation, AFailedBackwardDropsEarlierMicroBatchesAndSaysSo) {
  for (const auto strategy : kStrategies) {
    on_ranks(2, [&](const World& world) {
      FullyShardedDataParallel net(
          seeded(make_linear), world, Options().strategy(strategy));
      {
        const auto no_sync = net.no_sync();
        net.call(constant_loss, 1.0).backward();
        auto loss = net.call([](nn::LinearImpl& linear) {
          const auto weights = linear.weight * 7; // its gradient comes last
          weights.register_hook([](const Tensor& gradient) {
            TORCH_CHECK(false, "bad luck");
            return gradient;
          });
          return weights.sum() + linear.bias.sum();
        });
        const auto error = error_of([&] { loss.backward(); });
        EXPECT_TRUE(contains(error, "bad luck")) << error;
      }
      expect_dropped(net);
    });
  }
}

TEST(Accumulation, AFailureWithoutWaitingGradientsNeedsNoNewStart) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(seeded(make_linear), world);
    net.call(constant_loss, 1.0).backward(); // reduced: in .grad
    EXPECT_THROW(
        net.call([](nn::LinearImpl& linear) {
          (linear.weight * 2).sum();
          throw std::runtime_error("bad data");
        }),
        std::runtime_error);
    net.call(constant_loss, 2.0).backward();
    expect_gradients(net, 3.0);
  });
}

// The divisor.

struct Scalar : nn::Module {
  Scalar() : w(register_parameter("w", torch::ones({1}))) {}
  Tensor forward(const Tensor& samples) { return w * samples; }
  Tensor w;
};

/// Rank 0 has one sample, rank 1 has three.
Tensor samples_of(const World& world) {
  return world.rank() == 0 ? torch::tensor({4.0F})
                           : torch::tensor({1.0F, 2.0F, 3.0F});
}

TEST(Accumulation, TheMeanOverRanksIsTheDefault) {
  for (const auto strategy : kStrategies) {
    on_ranks(2, [&](const World& world) {
      FullyShardedDataParallel net(
          std::make_shared<Scalar>(), world, Options().strategy(strategy));
      net(samples_of(world)).mean().backward();
      expect_gradients(net, 3.0); // of 4 and 2
    });
  }
}

TEST(Accumulation, ASumLetsTheProgramWeighSamplesEqually) {
  for (const auto strategy : kStrategies) {
    on_ranks(2, [&](const World& world) {
      FullyShardedDataParallel net(
          std::make_shared<Scalar>(),
          world,
          Options().strategy(strategy).gradient_divide_factor(1.0));
      (net(samples_of(world)).sum() / 4).backward();
      expect_gradients(net, 2.5);
    });
  }
}

TEST(Accumulation, ACustomDivisorReplacesTheWholeDivisor) {
  for (const auto strategy : kStrategies) {
    for (const int size : {1, 3}) {
      on_ranks(size, [&](const World& world) {
        FullyShardedDataParallel net(
            seeded(make_linear),
            world,
            Options().strategy(strategy).gradient_divide_factor(0.5));
        {
          const auto no_sync = net.no_sync();
          net.call(constant_loss, 1.0).backward();
        }
        net.call(constant_loss, 2.0).backward();
        expect_gradients(net, 3.0 * size / 0.5);
      });
    }
  }
}

} // namespace accumulation
} // namespace fsdp::testing
