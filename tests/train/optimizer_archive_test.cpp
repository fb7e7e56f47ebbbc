// torch::save and torch::load of our optimizers, one file per rank.

#include "train/training.h"

#include <sstream>

namespace fsdp::testing {
namespace optimizer_archive {

namespace optim = torch::optim;
using at::Tensor;

const auto kOptions =
    optim::AdamWOptions(0.02).eps(1e-3).weight_decay(0.1).amsgrad(true);

template <class O>
std::string saved(const O& optimizer) {
  std::ostringstream stream;
  torch::save(optimizer, stream);
  return stream.str();
}

template <class O>
void load(O& optimizer, const std::string& file) {
  std::istringstream stream(file);
  torch::load(optimizer, stream);
}

template <class N>
void steps(N& net, optim::Optimizer& optimizer, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    net(wave({4, 3}, 0.7 + step)).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

auto shard_network(const World& world) {
  return FullyShardedDataParallel(
      seeded(make_network), world, Options().units(each<Block>()));
}

TEST(OptimizerArchive, TrainingGoesOnWithTheSameBits) {
  for (const int size : {1, 2, 4}) {
    on_ranks(size, [](const World& world) {
      auto straight = shard_network(world);
      AdamW expected(straight.parameters(), kOptions);
      steps(straight, expected, 0, 5);
      auto net = shard_network(world);
      std::string file;
      {
        AdamW optimizer(net.parameters(), kOptions);
        steps(net, optimizer, 0, 2);
        optimizer.param_groups()[0].options().set_lr(0.02);
        file = saved(optimizer);
      }
      AdamW optimizer(net.parameters(), optim::AdamWOptions(0.5));
      load(optimizer, file);
      steps(net, optimizer, 2, 5);
      expect_same_bits(whole_values(straight), whole_values(net));
    });
  }
}

TEST(OptimizerArchive, IsLibtorchs) {
  const auto train = [](auto first, auto second) {
    Plain net(seeded(make_network));
    auto before = first(net.parameters());
    steps(net, *before, 0, 2);
    auto after = second(net.parameters());
    load(*after, saved(*before));
    steps(net, *after, 2, 4);
    return values_of(net);
  };
  const auto ours = [](const std::vector<Tensor>& parameters) {
    return std::make_unique<AdamW>(parameters, kOptions);
  };
  const auto libtorchs = [](const std::vector<Tensor>& parameters) {
    return std::make_unique<optim::AdamW>(parameters, kOptions);
  };
  const auto expected = train(libtorchs, libtorchs);
  for (const auto& actual : {train(ours, libtorchs), train(libtorchs, ours)}) {
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(all_close(actual[i].second, expected[i].second, 1e-6, 1e-8))
          << expected[i].first;
    }
  }
}

TEST(OptimizerArchive, HasEachByteOfStateOnce) {
  // Each tensor of the state lies on the memory of its whole run.
  on_ranks(2, [](const World& world) {
    const std::vector<std::vector<int64_t>> sizes(20, {1000});
    const Tensors tensors(sizes);
    ShardedTensors net(tensors.units(), world);
    AdamW optimizer(net.parameters(), optim::AdamWOptions(0.1));
    net.call([&] { return tensors.loss(); }).backward();
    optimizer.step();
    const size_t state_bytes = 10 * 1024 * 2 * sizeof(float);
    const auto bytes = saved(optimizer).size();
    EXPECT_GT(bytes, state_bytes);
    EXPECT_LT(bytes, state_bytes * 2);
  });
}

TEST(OptimizerArchive, LoadingAgainAndAgainAddsNothing) {
  on_ranks(2, [](const World& world) {
    auto net = shard_network(world);
    AdamW optimizer(net.parameters(), kOptions);
    steps(net, optimizer, 0, 1);
    const auto file = saved(optimizer);
    const auto entries = optimizer.state().size();
    for (int i = 0; i < 10; ++i) {
      load(optimizer, file);
    }
    EXPECT_EQ(optimizer.state().size(), entries);
    EXPECT_EQ(saved(optimizer).size(), file.size());
  });
}

TEST(OptimizerArchive, KeepsOptionsOfAllGroupsAndEmptyShards) {
  // With four ranks, bias t1 has elements on one rank only.
  on_ranks(4, [](const World& world) {
    const Tensors tensors({{300}, {1}, {300}});
    ShardedTensors net(tensors.units(), world);
    const auto groups = [&](double scale) {
      ParamGroups result;
      for (size_t i = 0; i < 3; ++i) {
        result.emplace_back(
            std::vector<Tensor>{tensors.values[i]},
            std::make_unique<optim::AdamOptions>(
                scale * static_cast<double>(i + 1)));
      }
      return result;
    };
    Adam optimizer(groups(0.1));
    net.call([&] { return tensors.loss(); }).backward();
    optimizer.step();
    Adam loaded(groups(7.0));
    load(loaded, saved(optimizer));
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_DOUBLE_EQ(
          loaded.param_groups()[i].options().get_lr(),
          0.1 * static_cast<double>(i + 1));
      const auto& state = static_cast<const optim::AdamParamState&>(
          *loaded.state().at(tensors.values[i].unsafeGetTensorImpl()));
      EXPECT_EQ(state.exp_avg().sizes(), tensors.values[i].sizes());
      EXPECT_EQ(state.step(), 1);
    }
    loaded.step();
  });
}

} // namespace optimizer_archive
} // namespace fsdp::testing
