// Module::clone, Module::to, torch::save and torch::load of a sharded module.

#include "harness/chain.h"

#include <sstream>

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;
using at::Tensor;

struct TwoLayersImpl : nn::Cloneable<TwoLayersImpl> {
  TwoLayersImpl() { reset(); }
  void reset() override {
    first = register_module("first", nn::Linear(15, 15));
    second = register_module("second", nn::Linear(15, 15));
  }
  Tensor forward(const Tensor& x) { return second(torch::tanh(first(x))); }

  nn::Linear first{nullptr};
  nn::Linear second{nullptr};
};

/// A model that was built under the lock, with another seed for another `seed`.
std::shared_ptr<TwoLayersImpl> build_layers(int seed) {
  const auto model = build([&] {
    torch::manual_seed(seed);
    TestModel result;
    result.owner = std::make_shared<TwoLayersImpl>();
    return result;
  });
  return std::static_pointer_cast<TwoLayersImpl>(model.owner);
}

Tensor inputs() {
  return torch::linspace(-1, 1, kRows * 15).view({kRows, 15});
}

template <class M>
std::string saved(const std::shared_ptr<M>& module) {
  std::ostringstream stream;
  torch::serialize::OutputArchive archive;
  module->save(archive);
  archive.save_to(stream);
  return stream.str();
}

template <class M>
void load(const std::shared_ptr<M>& module, const std::string& text) {
  std::istringstream stream(text);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  module->load(archive);
}

using Net = FullyShardedDataParallel<TwoLayersImpl>;

void each_world(const std::function<void(const World&, const Options&)>& test) {
  for (const int world_size : {1, 2, 3, 4}) {
    for (const auto strategy : kAllStrategies) {
      SCOPED_TRACE(
          "strategy " + std::to_string(static_cast<int>(strategy)) +
          ", world size " + std::to_string(world_size));
      const auto options =
          Options().strategy(strategy).units(each<nn::Linear>());
      ASSERT_NO_THROW(run_ranks(
          world_size,
          [&](const World& world) { test(world, options); },
          kWaitLimit));
    }
  }
}

/// Trains three steps and expects the parameters of `plain` after the same.
void expect_trains_like(Net& net, const std::shared_ptr<TwoLayersImpl>& plain) {
  torch::optim::SGD optimizer(net.parameters(), 0.1);
  torch::optim::SGD expected(plain->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    auto loss = net(inputs()).pow(2).mean();
    auto reference = plain->forward(inputs()).pow(2).mean();
    EXPECT_NEAR(loss.item<double>(), reference.item<double>(), 1e-6);
    loss.backward();
    reference.backward();
    optimizer.step();
    expected.step();
    optimizer.zero_grad();
    expected.zero_grad();
  }
  for (const auto& [name, value] : whole_values(net)) {
    EXPECT_TRUE(
        all_close(value, plain->named_parameters()[name].detach(), 1e-6, 1e-8))
        << name;
  }
}

TEST(ModuleFiles, WholeFileIsLoadedAfterSharding) {
  const auto source = build_layers(2);
  const auto text = saved(source);
  each_world([&](const World& world, const Options& options) {
    const auto module = build_layers(1);
    Net net(module, world, options);
    load(module, text);
    const auto plain = build_layers(2);
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(net(inputs()), plain->forward(inputs())));
    const torch::AutoGradMode grad(true);
    expect_trains_like(net, plain);
  });
}

TEST(ModuleFiles, WholeFileIsLoadedBetweenSteps) {
  const auto text = saved(build_layers(2));
  each_world([&](const World& world, const Options& options) {
    const auto module = build_layers(1);
    Net net(module, world, options);
    expect_trains_like(net, build_layers(1));
    load(module, text);
    expect_trains_like(net, build_layers(2));
  });
}

TEST(ModuleFiles, WholeFileIsLoadedInARegion) {
  const auto text = saved(build_layers(2));
  each_world([&](const World& world, const Options& options) {
    const auto module = build_layers(1);
    Net net(module, world, options);
    net.call([&](TwoLayersImpl&) { load(module, text); });
    expect_trains_like(net, build_layers(2));
  });
}

TEST(ModuleFiles, SaveInARegionIsAnError) {
  each_world([&](const World& world, const Options& options) {
    const auto module = build_layers(1);
    Net net(module, world, options);
    if (options.strategy() != Strategy::kNoShard) {
      EXPECT_TRUE(fails_with(
          [&] { net.call([&](TwoLayersImpl&) { saved(module); }); },
          {"unit 'first'", "while it is not whole", "fsdp::touch(weight)"}));
    }
    expect_trains_like(net, build_layers(1));
  });
}

TEST(ModuleFiles, SaveOfWholeParametersIsAPlainFile) {
  each_world([&](const World& world, const Options& options) {
    const auto module = build_layers(1);
    Net net(module, world, options);
    const auto text = [&] {
      const auto whole = net.whole_parameters();
      return saved(module);
    }();
    const auto plain = build_layers(2);
    load(plain, text);
    expect_trains_like(net, plain);
  });
}

TEST(ModuleFiles, FileOfShardsIsLoadedIntoTheSameRank) {
  each_world([&](const World& world, const Options& options) {
    const auto source = build_layers(2);
    Net source_net(source, world, options);
    const auto text = saved(source);
    const auto module = build_layers(1);
    Net net(module, world, options);
    load(module, text);
    expect_trains_like(net, build_layers(2));
  });
}

TEST(ModuleFiles, FileOfShardsInAPlainModuleHasTheShapesOfShards) {
  run_ranks(
      2,
      [](const World& world) {
        const auto module = build_layers(1);
        const Net net(module, world);
        const auto plain = build_layers(2);
        load(plain, saved(module));
        EXPECT_EQ(plain->first->weight.dim(), 1);
        EXPECT_NE(error_of([&] { plain->forward(inputs()); }), "");
      },
      kWaitLimit);
}

TEST(ModuleFiles, CloneOfWholeParametersIsAPlainModule) {
  each_world([&](const World& world, const Options& options) {
    const auto module = build_layers(1);
    Net net(module, world, options);
    const auto copy = [&] {
      const auto whole = net.whole_parameters();
      return std::dynamic_pointer_cast<TwoLayersImpl>(module->clone());
    }();
    expect_trains_like(net, copy); // both from the same values
  });
}

TEST(ModuleFiles, CloneInARegionIsAPlainModule) {
  each_world([&](const World& world, const Options& options) {
    const auto module = build_layers(1);
    Net net(module, world, options);
    const auto copy = net.call([](TwoLayersImpl& each) {
      return std::dynamic_pointer_cast<TwoLayersImpl>(each.clone());
    });
    expect_trains_like(net, copy);
  });
}

TEST(ModuleFiles, CloneOutsideHasTheShapesOfShards) {
  run_ranks(
      2,
      [](const World& world) {
        const auto module = build_layers(1);
        const auto plain = build_layers(1); // clone() draws random numbers
        Net net(module, world);
        const auto copy =
            std::dynamic_pointer_cast<TwoLayersImpl>(module->clone());
        EXPECT_EQ(copy->first->weight.sizes(), module->first->weight.sizes());
        EXPECT_FALSE(copy->first->weight.is_alias_of(module->first->weight));
        EXPECT_NE(error_of([&] { copy->forward(inputs()); }), "");
        expect_trains_like(net, plain);
      },
      kWaitLimit);
}

TEST(ModuleFiles, ToAnotherDtypeIsRefusedAtTheNextCall) {
  each_world([&](const World& world, const Options& options) {
    const auto module = build_layers(1);
    Net net(module, world, options);
    module->to(at::kDouble);
    EXPECT_TRUE(fails_with(
        [&] { net(inputs()); },
        {"'first.weight'", "another dtype", "expected Float, but got Double"}));
    module->to(at::kFloat);
    module->to(at::kCPU); // changes nothing
    expect_trains_like(net, build_layers(1));
  });
}

// The writer of files refuses a net at compile time, with a hint.
namespace writing {
using torch::operator<<; // where torch::save finds it
template <class T>
concept Writable =
    requires(torch::serialize::OutputArchive& archive, const T& t) {
  archive << t;
};
} // namespace writing
static_assert(writing::Writable<Tensor>);
static_assert(!writing::Writable<Net>);
static_assert(!writing::Writable<ShardedTensors>);

} // namespace
} // namespace fsdp::testing
