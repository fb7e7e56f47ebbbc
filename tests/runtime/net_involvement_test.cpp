// Several nets in one program: a backward pass opens those that it involves,
// and closes them in one order on all ranks.

#include "net_pair.h"

namespace fsdp::testing {
namespace {

using at::Tensor;

TEST(NetInvolvement, UnrelatedBackwardOpensNoRegionAndWaitsForNobody) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        if (net.world().rank() != net.world().size() - 1) {
          return;
        }
        const auto gathers = net.gathers();
        bool sharded = false;
        auto z = torch::randn({3}).requires_grad_();
        auto y = z.pow(2);
        y.register_hook(
            [&](const Tensor&) { sharded = is_sharded(chain.weight(0)); });
        y.sum().backward();
        EXPECT_TRUE(sharded);
        EXPECT_TRUE(at::equal(z.grad(), 2 * z.detach()));
        EXPECT_EQ(net.gathers(), gathers);
        EXPECT_FALSE(chain.weight(0).grad().defined());
      },
      split_strategies());
}

TEST(NetInvolvement, BackwardOpensOnlyTheNetThatItReaches) {
  run_ranks(
      2,
      [](const World& world) {
        Pair pair(&world);
        const auto fake =
            pair.call_first([&] { return pair.first->forward(pair.first->x); });
        const auto loss = pair.call_second([&] {
          auto y = pair.second->forward(fake.detach());
          y.register_hook([&](const Tensor&) {
            EXPECT_TRUE(is_sharded(pair.first->weight(0)));
            EXPECT_FALSE(is_sharded(pair.second->weight(0)));
          });
          return y.pow(2).mean();
        });
        const auto gathers = pair.first_net->gathers();
        loss.backward();
        EXPECT_EQ(pair.first_net->gathers(), gathers);
        EXPECT_FALSE(pair.first->weight(0).grad().defined());
        EXPECT_TRUE(pair.second->weight(0).grad().defined());
      },
      kWaitLimit);
}

TEST(NetInvolvement, RanksMayMeetThemInDifferentOrder) {
  // Even ranks find the first net first in their graphs, odd ranks the second.
  for (const int world_size : {2, 3}) {
    run_ranks(
        world_size,
        [](const World& world) {
          Pair pair(&world);
          Pair plain(nullptr);
          for (int step = 0; step < 3; ++step) {
            const auto a = pair.call_first(
                [&] { return pair.first->forward(pair.first->x); });
            const auto b = pair.call_second(
                [&] { return pair.second->forward(pair.second->x); });
            const bool odd = world.rank() % 2 == 1;
            (odd ? b * a : a * b).sum().backward();
          }
          for (int step = 0; step < 3; ++step) {
            (plain.first->forward(plain.first->x) *
             plain.second->forward(plain.second->x))
                .sum()
                .backward();
          }
          const auto gradient = plain.first->weight(0).grad().flatten();
          const auto shard = pair.first->weight(0).grad();
          EXPECT_NEAR(
              mean_over_ranks(world, shard.abs().sum().item<double>()) *
                  world.size(),
              gradient.abs().sum().item<double>(),
              1e-5 * gradient.abs().sum().item<double>());
        },
        std::chrono::seconds(5));
  }
}

TEST(NetInvolvement, FailureInNestedRegionsEndsBothOnAllRanks) {
  run_ranks(
      3,
      [](const World& world) {
        Pair pair(&world);
        for (int times = 0; times < 2; ++times) {
          EXPECT_TRUE(fails_with(
              [&] {
                pair.call_first([&] {
                      const auto y = pair.first->forward(pair.first->x);
                      const auto z = pair.call_second([&] {
                        TORCH_CHECK(world.rank() != 1, "rank 1 gives up");
                        return pair.second->forward(y);
                      });
                      return pair.first->forward(z).sum();
                    })
                    .backward();
              },
              {"rank 1 gives up"}));
          EXPECT_TRUE(is_sharded(pair.first->weight(0)));
          EXPECT_TRUE(is_sharded(pair.second->weight(0)));
        }
        const auto loss = pair.call_first([&] {
          return pair.call_second([&] {
            return pair.second->forward(pair.first->forward(pair.first->x))
                .pow(2)
                .mean();
          });
        });
        loss.backward();
        Pair plain(nullptr);
        const auto expected =
            plain.second->forward(plain.first->forward(plain.first->x))
                .pow(2)
                .mean();
        EXPECT_TRUE(all_close(loss.detach(), expected.detach(), 1e-6, 0));
        EXPECT_TRUE(pair.first->weight(0).grad().defined());
      },
      kWaitLimit);
}

TEST(NetInvolvement, RanksMayUseDifferentNets) {
  // Rank 0 trains the first with one group of ranks, rank 1 the second with
  // another: nobody waits for a net that it has no part in.
  run_ranks(
      4,
      [](const World& world) {
        const auto half = world.split(world.rank() % 2, world.rank());
        const auto chain = build_chain(world.rank() % 2 == 0 ? 2 : 3);
        const auto plain = build_chain(world.rank() % 2 == 0 ? 2 : 3);
        ShardedTensors net(chain->units(), half);
        const auto rows = torch::arange(kRows);
        torch::optim::SGD optimizer(chain->parameters(), 0.1);
        torch::optim::SGD expected(plain->parameters(), 0.1);
        for (int step = 0; step < 3; ++step) {
          net.call([&] { return chain->loss(rows); }).backward();
          plain->loss(rows).backward();
          optimizer.step();
          expected.step();
          optimizer.zero_grad();
          expected.zero_grad();
        }
        const auto values = whole_values(net);
        for (size_t i = 0; i < values.size(); ++i) {
          EXPECT_TRUE(all_close(
              values[i].second, plain->parameters()[i].detach(), 1e-6, 1e-8));
        }
      },
      kWaitLimit);
}

} // namespace
} // namespace fsdp::testing
