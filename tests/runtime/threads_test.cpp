// Threads of the program: forward here, backward there, several at once.

#include "checkpoint_function.h"
#include "harness/chain.h"

#include <ATen/Parallel.h>

#include <future>
#include <latch>
#include <thread>

namespace fsdp::testing {
namespace {

using at::Tensor;

/// Runs `call` in a thread of its own and throws what it throws.
template <class F>
auto in_thread(F&& call) {
  return std::async(std::launch::async, std::forward<F>(call)).get();
}

void wait_for(std::latch& latch) {
  const auto deadline = std::chrono::steady_clock::now() + kWaitLimit;
  while (!latch.try_wait()) {
    TORCH_CHECK(
        std::chrono::steady_clock::now() < deadline, "another thread is late");
    std::this_thread::yield();
  }
}

TEST(Threads, ForwardAndBackwardRunInDifferentThreads) {
  expect_undisturbed([](Chain& chain, ShardedTensors& net) {
    const auto rows = rows_of_rank(net.world());
    const auto loss =
        in_thread([&] { return net.call([&] { return chain.loss(rows); }); });
    in_thread([&] { loss.backward(); });
    std::vector<Tensor> apart;
    for (auto& parameter : chain.parameters()) {
      ASSERT_TRUE(parameter.grad().defined());
      apart.push_back(parameter.grad().clone());
      parameter.mutable_grad().reset();
    }
    net.call([&] { return chain.loss(rows); }).backward();
    for (size_t i = 0; i < apart.size(); ++i) {
      auto parameter = chain.parameters()[i];
      EXPECT_TRUE(at::equal(apart[i], parameter.grad())) << i;
      parameter.mutable_grad().reset();
    }
  });
}

TEST(Threads, EveryStepRunsInAThreadOfItsOwn) {
  ChainTraining training;
  training.loss = [](Chain& chain, const Tensor& rows) {
    return in_thread([&] { return chain.loss(rows); });
  };
  expect_same_training(training);
}

TEST(Threads, CheckpointThatAnotherThreadMadeCallsTheNetItself) {
  // Its graph reaches no parameter, and the thread opened no region: nothing
  // tells backward that the net takes part.
  auto settings = split_strategies();
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        const auto rows = rows_of_rank(net.world());
        const auto take_gradients = [&] {
          std::vector<Tensor> gradients;
          for (auto& parameter : chain.parameters()) {
            gradients.push_back(parameter.grad());
            parameter.mutable_grad().reset();
          }
          return gradients;
        };
        const auto backward_of = [&](Checkpoint::Body& body) {
          const auto loss = net.call([&] {
            return in_thread([&] {
              const auto x = chain.x.index_select(0, rows).requires_grad_();
              return Checkpoint::apply(x, &body).pow(2).mean();
            });
          });
          loss.backward();
        };
        Checkpoint::Body body = [&](const Tensor& y) {
          return chain.forward(y);
        };
        EXPECT_TRUE(fails_with(
            [&] { backward_of(body); },
            {"'layer0.weight'", "outside of a region", "net.call(...)"}));
        const auto main_thread = std::this_thread::get_id();
        Checkpoint::Body calling = [&](const Tensor& y) {
          return std::this_thread::get_id() == main_thread
              ? net.call([&] { return chain.forward(y); })
              : chain.forward(y);
        };
        backward_of(calling);
        const auto gradients = take_gradients();
        net.call([&] { return chain.loss(rows); }).backward();
        const auto expected = take_gradients();
        for (size_t i = 0; i < gradients.size(); ++i) {
          EXPECT_TRUE(at::equal(gradients[i], expected[i])) << i;
        }
      },
      settings);
}

TEST(Threads, TwoThreadsReadOneNetInOneRegion) {
  const auto chain = build_chain(4, 33);
  const auto run = [&](size_t first) {
    const torch::NoGradGuard no_grad;
    Tensor sum = torch::zeros({});
    for (int round = 0; round < 50; ++round) {
      auto y = chain->x;
      for (size_t i = 0; i < 4; ++i) {
        y = torch::tanh(chain->layers[(first + i) % 4]->forward(y));
      }
      sum += y.sum();
    }
    return sum;
  };
  const auto expected_a = run(0);
  const auto expected_b = run(2);
  ShardedTensors net(chain->units(), World(), Options().slots(1));
  const auto before = net.gathers();
  net.call([&] {
    auto a = std::async(std::launch::async, run, 0);
    auto b = std::async(std::launch::async, run, 2);
    EXPECT_TRUE(at::equal(expected_a, a.get()));
    EXPECT_TRUE(at::equal(expected_b, b.get()));
  });
  EXPECT_GT(net.gathers() - before, 4); // weights were let go under way
  EXPECT_EQ(net.memory().gathered_bytes, 0);
}

TEST(Threads, ParallelForWorkersReadWeights) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        std::vector<Tensor> products(16);
        net.call([&] {
          at::parallel_for(0, 16, 1, [&](int64_t begin, int64_t end) {
            const torch::NoGradGuard no_grad;
            for (auto i = begin; i < end; ++i) {
              products[i] = chain.x.mm(chain.weight(i % 4));
            }
          });
        });
        const auto whole = net.whole_parameters();
        const torch::NoGradGuard no_grad;
        for (size_t i = 0; i < products.size(); ++i) {
          const auto expected = chain.x.mm(chain.weight(i % 4));
          EXPECT_TRUE(at::equal(products[i], expected)) << i;
        }
      },
      [] {
        ParitySettings settings;
        settings.world_sizes = {1}; // else the order of gathers is open
        return settings;
      }());
}

TEST(Threads, RegionThatAnotherThreadHoldsIsRefused) {
  expect_undisturbed([](Chain& chain, ShardedTensors& net) {
    auto region = net.region();
    const auto rank = std::to_string(net.world().rank()) + "/" +
        std::to_string(net.world().size());
    in_thread([&] {
      EXPECT_TRUE(fails_with(
          [&] { net.call([&] { return chain.forward(chain.x); }); },
          {"region of this net is open in another thread", rank}));
    });
    region.close();
  });
}

TEST(Threads, BackwardOfANetThatRunsBackwardElsewhereIsRefused) {
  expect_undisturbed([](Chain& chain, ShardedTensors& net) {
    std::latch first_runs(1);
    std::latch second_refused(1);
    const auto rows = rows_of_rank(net.world());
    const auto loss_of = [&](bool waits) {
      return net.call([&] {
        auto y = chain.forward(chain.x.index_select(0, rows));
        if (waits) {
          y.register_hook([&](const Tensor&) {
            first_runs.count_down();
            wait_for(second_refused);
          });
        }
        return y.pow(2).mean();
      });
    };
    const auto first = loss_of(true);
    const auto second = loss_of(false);
    auto running = std::async(std::launch::async, [&] { first.backward(); });
    wait_for(first_runs);
    EXPECT_TRUE(fails_with(
        [&] { second.backward({}, /*retain_graph=*/true); },
        {"region of this net is open in another thread",
         "one forward or backward at a time"}));
    second_refused.count_down();
    running.get();
    const auto gradient = chain.weight(2).grad().clone();
    for (auto& parameter : chain.parameters()) {
      parameter.mutable_grad().reset();
    }
    second.backward(); // now it may
    EXPECT_TRUE(at::equal(gradient, chain.weight(2).grad()));
    for (auto& parameter : chain.parameters()) {
      parameter.mutable_grad().reset();
    }
  });
}

/// Losses of a chain that is trained by SGD.
std::vector<double> train_alone(
    Chain& chain,
    const std::function<Tensor(const std::function<Tensor()>&)>& call) {
  torch::optim::SGD optimizer(
      chain.parameters(), torch::optim::SGDOptions(0.1));
  std::vector<double> losses;
  for (int step = 0; step < 10; ++step) {
    auto loss = call([&] { return chain.loss(torch::arange(kRows)); });
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

std::vector<double> train_sharded_alone(Chain& chain, const World& world) {
  ShardedTensors net(chain.units(), world);
  return train_alone(chain, [&](const auto& loss) { return net.call(loss); });
}

TEST(Threads, TwoNetsTrainAtOnce) {
  const auto expected_a =
      train_alone(*build_chain(3), [](const auto& loss) { return loss(); });
  const auto expected_b =
      train_alone(*build_chain(5, 9), [](const auto& loss) { return loss(); });
  for (const int world_size : {1, 2}) {
    const auto worlds_a = thread_worlds(world_size, kWaitLimit);
    const auto worlds_b = thread_worlds(world_size, kWaitLimit);
    std::vector<std::future<std::vector<double>>> a;
    std::vector<std::future<std::vector<double>>> b;
    for (int rank = 0; rank < world_size; ++rank) {
      a.push_back(std::async(std::launch::async, [&, rank] {
        return train_sharded_alone(*build_chain(3), worlds_a[rank]);
      }));
      b.push_back(std::async(std::launch::async, [&, rank] {
        return train_sharded_alone(*build_chain(5, 9), worlds_b[rank]);
      }));
    }
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(a[rank].get(), expected_a); // the same rows: the same bits
      EXPECT_EQ(b[rank].get(), expected_b);
    }
  }
}

TEST(Threads, BackwardPassesOfTwoNetsRunAtOnce) {
  const auto a = build_chain();
  const auto b = build_chain();
  ShardedTensors net_a(a->units());
  ShardedTensors net_b(b->units());
  std::latch both_run(2);
  const auto loss_of = [&](Chain& chain, ShardedTensors& net) {
    return net.call([&] {
      auto y = chain.forward(chain.x);
      y.register_hook([&](const Tensor&) {
        both_run.count_down();
        wait_for(both_run);
      });
      return y.pow(2).mean();
    });
  };
  const auto loss_a = loss_of(*a, net_a);
  const auto loss_b = loss_of(*b, net_b);
  auto first = std::async(std::launch::async, [&] { loss_a.backward(); });
  loss_b.backward();
  first.get();
  const auto c = build_chain();
  c->loss(torch::arange(kRows)).backward();
  for (size_t i = 0; i < c->parameters().size(); ++i) {
    const auto expected = c->parameters()[i].grad().flatten();
    EXPECT_TRUE(at::equal(a->parameters()[i].grad(), expected)) << i;
    EXPECT_TRUE(at::equal(b->parameters()[i].grad(), expected)) << i;
  }
}

TEST(Threads, GathersInDifferentOrderAreAnErrorOnAllRanks) {
  FSDP_SKIP_IF(weights_are_shared(), "ranks may read them in any order");
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        EXPECT_TRUE(fails_with(
            [&] {
              net.call([&] {
                const torch::NoGradGuard no_grad;
                const bool odd = net.world().rank() % 2 == 1;
                chain.weight(odd ? 2 : 1).sum();
                chain.weight(odd ? 1 : 2).sum();
              });
            },
            {"all_gather of unit 'layer1'",
             "all_gather of unit 'layer2'",
             "in the same order"}));
      },
      [] {
        auto settings = split_strategies();
        settings.world_sizes = {2, 3, 4};
        return settings;
      }());
}

} // namespace
} // namespace fsdp::testing
