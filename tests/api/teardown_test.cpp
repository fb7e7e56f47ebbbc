// Ends: orders of destruction, exceptions on some ranks, nets that outlive
// parts.

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <optional>

namespace fsdp::testing {
namespace teardown {

namespace nn = torch::nn;
using at::Tensor;
using Net = FullyShardedDataParallel<NetworkImpl>;

const auto kUnits = Options().units(each<Block>());

void expect_right_step(Net& net) {
  const auto x = wave({4, 3});
  net->zero_grad();
  net(x).pow(2).mean().backward();
  const auto plain = seeded(make_network);
  plain->forward(x).pow(2).mean().backward();
  for (const auto& [name, gradient] : whole_gradients(net)) {
    EXPECT_TRUE(
        all_close(gradient, plain->named_parameters()[name].grad(), 1e-6, 1e-8))
        << name;
  }
}

// Orders of destruction.

TEST(Teardown, TheNetKeepsItsWorldAlive) {
  std::vector<std::optional<World>> worlds;
  for (auto& world : thread_worlds(2, std::chrono::seconds(20))) {
    worlds.emplace_back(world);
  }
  std::vector<std::thread> threads;
  for (auto& world : worlds) {
    threads.emplace_back([&world] {
      Net net(seeded(make_network), *world, kUnits);
      world.reset();
      expect_right_step(net);
      EXPECT_EQ(net.world().size(), 2);
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

TEST(Teardown, TheOptimizerMayOutliveTheNet) {
  on_ranks(2, [](const World& world) {
    std::optional<torch::optim::Adam> optimizer;
    std::vector<Tensor> parameters;
    {
      Net net(seeded(make_network), world, kUnits);
      optimizer.emplace(net.parameters(), 0.01);
      net(wave({4, 3})).pow(2).mean().backward();
      parameters = net.parameters();
    }
    const auto before = parameters[0].detach().clone();
    optimizer->step(); // on what were shards
    EXPECT_EQ(parameters[0].dim(), 1);
    if (before.numel() > 0) {
      EXPECT_FALSE(at::equal(parameters[0].detach(), before));
    }
  });
}

TEST(Teardown, TheModuleMayOutliveTheNet) {
  on_ranks(2, [](const World& world) {
    const auto module = seeded(make_network);
    {
      Net net(module, world, kUnits);
      net(wave({4, 3}));
    }
    // What is left are shards: not a model any more, but nothing to crash on.
    EXPECT_EQ(module->head->weight.dim(), 1);
    EXPECT_EQ(
        module->head->weight.detach().sum().item<float>(),
        module->head->weight.detach().clone().sum().item<float>());
    EXPECT_NE(error_of([&] { module->forward(wave({4, 3})); }), "");
  });
}

TEST(Teardown, AnOutputMayOutliveTheNet) {
  on_ranks(2, [](const World& world) {
    Tensor y;
    {
      Net net(seeded(make_network), world, kUnits);
      y = net(wave({4, 3}));
    }
    const auto plain = seeded(make_network);
    EXPECT_TRUE(all_close(y, plain->forward(wave({4, 3})), 1e-6, 1e-8));
    const auto error = error_of([&] { y.sum().backward(); });
    EXPECT_TRUE(contains(error, "net that was destroyed")) << error;
  });
}

TEST(Teardown, AGuardMayOutliveTheNet) {
  on_ranks(2, [](const World& world) {
    std::optional<Net> net(std::in_place, seeded(make_network), world, kUnits);
    {
      const auto region = net->region();
      const auto no_sync = net->no_sync();
      net.reset();
    }
    Net again(seeded(make_network), world, kUnits);
    expect_right_step(again);
  });
}

TEST(Teardown, NetsAreDestroyedInAnyOrderAndAtAnyTime) {
  on_ranks(3, [](const World& world) {
    auto first = std::make_unique<Net>(seeded(make_network), world, kUnits);
    auto second = std::make_unique<Net>(seeded(make_network), world, kUnits);
    auto loss = (*first)(wave({4, 3})).sum() + (*second)(wave({4, 3})).sum();
    if (world.rank() == 1) { // destruction is local
      first.reset();
      second.reset();
    } else {
      second.reset();
      first.reset();
    }
    loss.reset();
    Net third(seeded(make_network), world, kUnits);
    expect_right_step(third);
  });
}

TEST(Teardown, ANetMayBeDestroyedInAnotherThread) {
  on_ranks(2, [](const World& world) {
    auto net = std::make_unique<Net>(seeded(make_network), world, kUnits);
    expect_right_step(*net);
    std::thread([moved = std::move(net)]() mutable { moved.reset(); }).join();
  });
}

TEST(Teardown, MidwayThroughAccumulation) {
  on_ranks(2, [](const World& world) {
    {
      Net net(seeded(make_network), world, kUnits);
      const auto no_sync = net.no_sync();
      net(wave({4, 3})).sum().backward();
    }
    Net again(seeded(make_network), world, kUnits);
    expect_right_step(again);
  });
}

// Exceptions.

TEST(Teardown, ARankThatThrowsEndsAllRanksWithItsMessage) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::string> errors(3);
  const auto error = error_of([&] {
    run_ranks(
        3,
        [&](const World& world) {
          Net net(seeded(make_network), world, kUnits);
          errors[static_cast<size_t>(world.rank())] = error_of([&] {
            for (int step = 0;; ++step) {
              TORCH_CHECK(
                  world.rank() != 1 || step < 2, "rank 1 lost its data");
              net(wave({4, 3})).pow(2).mean().backward();
            }
          });
          TORCH_CHECK(false, errors[static_cast<size_t>(world.rank())]);
        },
        std::chrono::seconds(20));
  });
  EXPECT_TRUE(contains(error, "rank 1 lost its data")) << error;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  share_results(errors);
  for (const auto& each : errors) {
    EXPECT_TRUE(contains(each, "rank 1 lost its data")) << each;
  }
}

TEST(Teardown, ThePeersOfARankThatThrewGetADistBackendError) {
  std::vector<std::string> kinds(3);
  EXPECT_THROW(
      run_ranks(
          3,
          [&](const World& world) {
            Net net(seeded(make_network), world, kUnits);
            expect_right_step(net);
            if (world.rank() == 2) {
              throw std::runtime_error("rank 2 is out of memory");
            }
            try {
              net(wave({4, 3}));
              kinds[static_cast<size_t>(world.rank())] = "nothing";
            } catch (const c10::DistBackendError& error) {
              kinds[static_cast<size_t>(world.rank())] =
                  error.what_without_backtrace();
              throw;
            }
          },
          std::chrono::seconds(20)),
      std::exception);
  share_results(kinds);
  for (const int rank : {0, 1}) {
    const auto& kind = kinds[static_cast<size_t>(rank)];
    EXPECT_TRUE(contains(kind, "rank 2/3 failed")) << kind;
    EXPECT_TRUE(contains(kind, "rank 2 is out of memory")) << kind;
  }
}

/// Fails in one place on rank 1 and expects that all ranks know of it, that no
/// gradient is left, and that the next step is right. `news`: what peers hear.
/// An exception that passes a region's destructor cannot be read there.
void expect_recovery(
    const std::function<void(Net& net, bool fails)>& step,
    const std::string& news = "an accident") {
  for (const auto strategy : kAllStrategies) {
    std::vector<std::string> errors(3);
    on_ranks(3, [&](const World& world) {
      auto options = kUnits;
      Net net(seeded(make_network), world, options.strategy(strategy));
      expect_right_step(net);
      net->zero_grad();
      errors[static_cast<size_t>(world.rank())] =
          error_of([&] { step(net, world.rank() == 1); });
      for (const auto& parameter : net.parameters()) {
        EXPECT_FALSE(parameter.grad().defined());
      }
      EXPECT_EQ(net.memory().gathered_bytes, 0);
      EXPECT_EQ(net.memory().unreduced_gradient_bytes, 0);
      expect_right_step(net);
      expect_right_step(net);
    });
    share_results(errors);
    for (const size_t rank : {0, 1, 2}) {
      EXPECT_TRUE(contains(errors[rank], rank == 1 ? "an accident" : news))
          << errors[rank];
    }
  }
}

[[noreturn]] void accident() {
  throw std::runtime_error("an accident");
}

TEST(Teardown, AFailureInForwardOnOneRankIsOver) {
  expect_recovery([](Net& net, bool fails) {
    auto y = net.call([&](NetworkImpl& module) {
      auto features = module.features(wave({4, 3}));
      if (fails) {
        accident();
      }
      return module.head(features);
    });
    y.sum().backward();
  });
}

TEST(Teardown, AFailureBeforeForwardOnOneRankIsOver) {
  expect_recovery([](Net& net, bool fails) {
    net.call([&](NetworkImpl& module) {
         if (fails) {
           accident();
         }
         return module.forward(wave({4, 3}));
       })
        .sum()
        .backward();
  });
}

TEST(Teardown, AFailureInBackwardOnOneRankIsOver) {
  expect_recovery([](Net& net, bool fails) {
    auto y = net.call(&NetworkImpl::features, wave({4, 3}));
    if (fails) {
      y.register_hook([](const Tensor& gradient) {
        accident();
        return gradient;
      });
    }
    net.call([&](NetworkImpl& module) { return module.head(y).sum(); })
        .backward();
  });
}

TEST(Teardown, AFailureInARegionOnOneRankIsOver) {
  expect_recovery(
      [](Net& net, bool fails) {
        auto region = net.region();
        auto loss = net(wave({4, 3})).sum();
        if (fails) {
          accident();
        }
        loss.backward();
        region.close();
      },
      "an exception left a region");
}

TEST(Teardown, AFailureAfterBackwardIsHeardInTheNextCall) {
  // Closing a region is local, so the peers have ended their step.
  for (const auto strategy : {Strategy::kFullShard, Strategy::kShardGradOp}) {
    std::vector<std::string> errors(3);
    on_ranks(3, [&](const World& world) {
      auto options = kUnits;
      Net net(seeded(make_network), world, options.strategy(strategy));
      const bool fails = world.rank() == 1;
      const auto error = error_of([&] {
        auto region = net.region();
        net(wave({4, 3})).sum().backward();
        if (fails) {
          accident();
        }
        region.close();
      });
      EXPECT_EQ(error, fails ? "an accident" : "");
      for (const auto& parameter : net.parameters()) {
        EXPECT_EQ(parameter.grad().defined(), !fails);
      }
      if (!fails) {
        // A forward alone may not need the others.
        errors[static_cast<size_t>(world.rank())] = error_of([&] {
          net(wave({4, 3})).sum().backward();
        });
      }
      expect_right_step(net);
      expect_right_step(net);
    });
    share_results(errors);
    for (const size_t rank : {0, 2}) {
      EXPECT_TRUE(contains(errors[rank], "rank 1/3 failed")) << errors[rank];
      EXPECT_TRUE(contains(errors[rank], "an exception left a region"))
          << errors[rank];
    }
  }
}

TEST(Teardown, AFailureThatADestructorMetIsThrownByTheNextCall) {
  on_ranks(2, [](const World& world) {
    Net net(seeded(make_network), world, kUnits);
    EXPECT_NO_THROW({
      const auto region = net.region();
      net(wave({4, 3}));
      net->head->weight.set_data(torch::zeros({1000}));
    }); // cannot be kept, and the destructor cannot throw
    const auto error = error_of([&] { net(wave({4, 3})); });
    EXPECT_TRUE(contains(error, "'head.weight'")) << error;
    EXPECT_TRUE(contains(error, "1000")) << error;
    expect_right_step(net);
  });
}

TEST(Teardown, AMissingRankIsATimeoutThatNamesIt) {
  std::vector<std::string> errors(3);
  run_ranks(
      3,
      [&](const World& world) {
        Net net(seeded(make_network), world, kUnits);
        if (world.rank() == 2) {
          return; // without a word
        }
        errors[static_cast<size_t>(world.rank())] = error_of([&] {
          net(wave({4, 3}));
        });
      },
      std::chrono::milliseconds(500));
  share_results(errors);
  for (const size_t rank : {0, 1}) {
    EXPECT_TRUE(contains(errors[rank], "all_gather of unit '(root)'"))
        << errors[rank];
    EXPECT_TRUE(contains(errors[rank], "2")) << errors[rank];
  }
}

} // namespace teardown
} // namespace fsdp::testing
