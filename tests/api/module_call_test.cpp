// Modules and methods that are called with and without their net.

#include "api/faces.h"
#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>

namespace fsdp::testing {
namespace module_calls {

namespace nn = torch::nn;
using at::Tensor;

TEST(ModuleCall, ForwardOfTheModuleSaysWhatToDo) {
  with_net([](auto& net, auto& plain) {
    const auto x = wave({4, 3});
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { net->forward(x); },
             [&] { net.module()->forward(x); },
             [&] { net->linear(x); },
             [&] { net->parts(x); }}) {
      const auto error = error_of(call);
      EXPECT_TRUE(
          contains(error, "'linear.weight'") ||
          contains(error, "'linear.bias'"))
          << error;
      EXPECT_TRUE(contains(error, "net(x)")) << error;
      EXPECT_TRUE(contains(error, "net.region()")) << error;
      EXPECT_TRUE(
          contains(error, "rank " + std::to_string(net.world().rank()) + "/3"))
          << error;
    }
    EXPECT_THROW(net->forward(x), c10::ValueError);
    expect_near(net(x), plain.forward(x)); // nothing is left behind
  });
}

TEST(ModuleCall, ForwardOfTheModuleWorksInARegion) {
  with_net([](auto& net, auto& plain) {
    const auto x = wave({4, 3});
    const auto region = net.region();
    expect_near(net->forward(x), plain.forward(x));
    expect_near(net(x), plain.forward(x));
  });
}

struct Encoder : nn::Module {
  Encoder()
      : embed(register_module("embed", nn::Linear(3, 4))),
        head(register_module("head", nn::Linear(3, 2))) {}
  Tensor encode(const Tensor& x) { return torch::tanh(embed(x)); }
  Tensor decode(const Tensor& code) {
    return head(code.matmul(embed->weight)); // a child's weight
  }
  nn::Linear embed, head;
};

TEST(ModuleCall, OtherMethodsTrainToo) {
  ProgramSettings settings;
  settings.options.units(each<nn::Linear>());
  expect_same_program(
      [] { return std::make_shared<Encoder>(); },
      [](auto& net, Log& log) {
        torch::optim::SGD optimizer(net.parameters(), 0.1);
        for (int step = 0; step < 3; ++step) {
          const auto x = log.mine(wave({kRows, 3}));
          const auto code = net.call(&Encoder::encode, x);
          auto loss = net.call(&Encoder::decode, code).pow(2).mean();
          loss.backward();
          log.loss(loss);
          optimizer.step();
          optimizer.zero_grad();
          log.parameters(net);
        }
      },
      settings);
}

TEST(ModuleCall, AMethodThatThrowsLeavesTheNetUsable) {
  with_net([](auto& net, auto& plain) {
    const auto x = wave({4, 3});
    EXPECT_THROW(
        net.call([&](FacesImpl& module) {
          module.linear(x);
          throw std::runtime_error("out of ideas");
        }),
        std::runtime_error);
    EXPECT_EQ(net.memory().gathered_bytes, 0);
    EXPECT_EQ(net.parameters()[0].dim(), 1);
    // All ranks threw: they meet again in the next call.
    expect_near(net(x), plain.forward(x));
  });
}

TEST(ModuleCall, ThrowsThingsThatAreNoExceptions) {
  with_net([](auto& net, auto& plain) {
    const auto x = wave({4, 3});
    EXPECT_THROW(
        net.call([&](FacesImpl& module) {
          module.linear(x);
          throw 7;
        }),
        int);
    expect_near(net(x), plain.forward(x));
  });
}

TEST(ModuleCall, SequentialAndAnyModuleAreCalledAsUsual) {
  const auto make = [] {
    auto sequence = nn::Sequential(
        nn::Linear(3, 4),
        nn::Functional(torch::tanh),
        Block(4),
        nn::Linear(4, 2));
    return sequence.ptr();
  };
  ProgramSettings settings;
  settings.options = Options().units(each<Block>() | named("0"));
  expect_same_program(
      make,
      [](auto& net, Log& log) {
        torch::optim::SGD optimizer(net.parameters(), 0.1);
        for (int step = 0; step < 3; ++step) {
          auto loss = net(log.mine(wave({kRows, 3}))).pow(2).mean();
          loss.backward();
          log.loss(loss);
          optimizer.step();
          optimizer.zero_grad();
        }
        log.parameters(net);
      },
      settings);
}

struct AnyHolder : nn::Module {
  AnyHolder() {
    auto linear = nn::Linear(3, 2);
    register_module("inner", linear);
    any = nn::AnyModule(linear);
  }
  Tensor forward(const Tensor& x) { return any.forward(x); }
  nn::AnyModule any;
};

TEST(ModuleCall, AnyModuleSeesWholeWeights) {
  on_ranks(2, [](const World& world) {
    const auto make = [] { return std::make_shared<AnyHolder>(); };
    FullyShardedDataParallel net(seeded(make), world);
    const auto plain = seeded(make);
    const auto x = wave({4, 3});
    expect_near(net(x), plain->forward(x));
    const auto error = error_of([&] { net->any.forward(x); });
    EXPECT_TRUE(contains(error, "'inner.weight'")) << error;
  });
}

TEST(ModuleCall, AContainerWithoutForwardIsUsedThroughCall) {
  on_ranks(2, [](const World& world) {
    const auto make = [] {
      nn::ModuleList list;
      list->push_back(nn::Linear(3, 4));
      list->push_back(nn::Linear(4, 2));
      return list;
    };
    FullyShardedDataParallel net(
        seeded(make), world, Options().units(each<nn::Linear>()));
    auto plain = seeded(make);
    const auto run = [](nn::ModuleListImpl& list, Tensor x) {
      for (const auto& each : list) {
        x = each->as<nn::LinearImpl>()->forward(x);
      }
      return x;
    };
    const auto x = wave({4, 3});
    expect_near(net.call(run, x), run(*plain, x));
  });
}

TEST(ModuleCall, AListLikeContainerMayBeAUnit) {
  ProgramSettings settings;
  settings.options.units(each<nn::ModuleList>());
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        auto loss = net(log.mine(wave({kRows, 3}))).pow(2).mean();
        loss.backward();
        log.loss(loss);
        log.gradients(net);
      },
      settings);
}

TEST(ModuleCall, ModesAndZeroGradGoThroughTheArrow) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(seeded(make_network), world);
    net->eval();
    EXPECT_FALSE(net->layers[0]->is_training());
    net->train();
    EXPECT_TRUE(net->layers[0]->is_training());
    net(wave({4, 3})).sum().backward();
    EXPECT_TRUE(net.parameters()[0].grad().defined());
    net->zero_grad(/*set_to_none=*/false);
    EXPECT_EQ(net.clip_grad_norm_(1.0), 0.0);
    net->zero_grad();
    EXPECT_FALSE(net.parameters()[0].grad().defined());
  });
}

} // namespace module_calls
} // namespace fsdp::testing
