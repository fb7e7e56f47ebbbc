// Ways to call a net.

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <tuple>

namespace fsdp::testing {
namespace calls {

namespace nn = torch::nn;
using at::Tensor;

struct Parts {
  Tensor left;
  std::vector<std::optional<Tensor>> right;
};

/// One linear layer with many faces.
struct FacesImpl : nn::Module {
  FacesImpl() : linear(register_module("linear", nn::Linear(3, 5))) {}

  Tensor forward(const Tensor& x, double scale = 1.0) {
    return linear(x) * scale;
  }
  Tensor forward(const std::vector<Tensor>& all) {
    return linear(torch::cat(all));
  }
  std::tuple<Tensor, int> forward(const Tensor& x, const std::string& label) {
    return {linear(x), static_cast<int>(label.size())};
  }
  Parts parts(const Tensor& x) {
    const auto y = linear(x);
    return {y.slice(1, 0, 2), {std::nullopt, y.slice(1, 2, 5)}};
  }
  Tensor consume(std::unique_ptr<Tensor> x) { return linear(*x); }
  std::unique_ptr<Tensor> boxed(const Tensor& x) {
    return std::make_unique<Tensor>(linear(x));
  }
  Tensor& cached(const Tensor& x) {
    last = linear(x);
    return last;
  }
  void remember(const Tensor& x) { last = linear(x); }
  int64_t outputs() const { return linear->weight.size(0); }
  static Tensor twice(FacesImpl& self, const Tensor& x) {
    return 2 * self.linear(x);
  }

  nn::Linear linear;
  Tensor last;
};
TORCH_MODULE(Faces);

auto make_faces() {
  return seeded([] { return std::make_shared<FacesImpl>(); });
}

void with_net(
    const std::function<
        void(FullyShardedDataParallel<FacesImpl>&, FacesImpl& plain)>& body) {
  on_ranks(3, [&](const World& world) {
    FullyShardedDataParallel net(make_faces(), world);
    body(net, *make_faces());
  });
}

void expect_near(const Tensor& actual, const Tensor& expected) {
  EXPECT_TRUE(all_close(actual, expected, 1e-6, 1e-8));
}

TEST(Call, ForwardKeepsOverloadsAndDefaultArguments) {
  with_net([](auto& net, auto& plain) {
    const auto x = wave({4, 3});
    expect_near(net(x), plain.forward(x));
    expect_near(net(x, 0.5), plain.forward(x, 0.5));
    const std::vector<Tensor> both = {x, x};
    expect_near(net(both), plain.forward(both));
    const auto [y, length] = net(x, std::string("abc"));
    expect_near(y, plain.forward(x));
    EXPECT_EQ(length, 3);
  });
}

TEST(Call, TakesMemberFunctionsFreeFunctionsAndLambdas) {
  with_net([](auto& net, auto& plain) {
    const auto x = wave({4, 3});
    net.call(&FacesImpl::remember, x);
    expect_near(net->last, plain.forward(x));
    EXPECT_EQ(net.call(&FacesImpl::outputs), 5);
    expect_near(net.call(&FacesImpl::twice, x), 2 * plain.forward(x));
    expect_near(
        net.call([&](FacesImpl& module) {
          return module.forward({x, x});
        }),
        plain.forward({x, x}));
    expect_near(
        net.call(
            [](auto& module, const Tensor& y) { return module.linear(y); }, x),
        plain.forward(x));
  });
}

TEST(Call, MovesArgumentsAndResults) {
  with_net([](auto& net, auto& plain) {
    const auto x = wave({4, 3});
    expect_near(
        net.call(&FacesImpl::consume, std::make_unique<Tensor>(x)),
        plain.forward(x));
    const std::unique_ptr<Tensor> boxed = net.call(&FacesImpl::boxed, x);
    expect_near(*boxed, plain.forward(x));
  });
}

TEST(Call, ReturnsReferencesAsReferences) {
  with_net([](auto& net, auto& plain) {
    const auto x = wave({4, 3});
    auto& last = net.call(&FacesImpl::cached, x);
    static_assert(
        std::is_same_v<decltype(net.call(&FacesImpl::cached, x)), Tensor&>);
    EXPECT_EQ(&last, &net->last);
    expect_near(last, plain.forward(x));
  });
}

TEST(Call, PassesALambdasStateByReference) {
  with_net([](auto& net, auto& plain) {
    const auto x = wave({4, 3});
    int calls = 0;
    auto counting = [&calls, &x](FacesImpl& module) mutable {
      ++calls;
      return module.forward(x);
    };
    expect_near(net.call(counting), plain.forward(x));
    net.call(counting);
    EXPECT_EQ(calls, 2);
  });
}

template <class F>
void expect_same_gradients(F loss_of) {
  constexpr int kSteps = 2;
  expect_same_program(
      [] { return std::make_shared<FacesImpl>(); },
      [&](auto& net, Log& log) {
        for (int step = 0; step < kSteps; ++step) {
          auto loss = loss_of(net, log.mine(wave({kRows, 3}, 0.7 + step)));
          loss.backward();
          log.loss(loss);
          log.gradients(net);
        }
      });
}

TEST(Call, GradientsFlowThroughAStruct) {
  expect_same_gradients([](auto& net, const Tensor& x) {
    const Parts parts = net.call(&FacesImpl::parts, x);
    return parts.right[1]->pow(2).mean();
  });
}

TEST(Call, GradientsFlowThroughATuple) {
  expect_same_gradients([](auto& net, const Tensor& x) {
    auto [y, length] = net(x, std::string("abc"));
    return y.pow(2).mean() * length;
  });
}

TEST(Call, GradientsFlowThroughVectorsAndOptionals) {
  expect_same_gradients([](auto& net, const Tensor& x) {
    const auto outputs = net.call([&](FacesImpl& module) {
      const auto y = module.linear(x);
      return std::optional(y.split(2, 1));
    });
    return outputs->at(1).pow(2).mean() + outputs->at(2).mean();
  });
}

TEST(Call, GradientsFlowThroughEditedOutputs) {
  expect_same_gradients([](auto& net, const Tensor& x) {
    auto y = net.call(
        [&](FacesImpl& module) { return module.linear(x).view({-1}); });
    y.mul_(2); // an output that is a view, edited in place
    return y.pow(2).mean();
  });
}

TEST(Call, AStructIsKeptInsideTheModule) {
  expect_same_gradients([](auto& net, const Tensor& x) {
    net.call(&FacesImpl::remember, x);
    return net->last.pow(2).mean();
  });
}

// What does not go through the net.

TEST(Call, ForwardOfTheModuleSaysWhatToDo) {
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

TEST(Call, ForwardOfTheModuleWorksInARegion) {
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

TEST(Call, OtherMethodsTrainToo) {
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

TEST(Call, AMethodThatThrowsLeavesTheNetUsable) {
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

TEST(Call, ThrowsThingsThatAreNoExceptions) {
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

TEST(Call, SequentialAndAnyModuleAreCalledAsUsual) {
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

TEST(Call, AnyModuleSeesWholeWeights) {
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

TEST(Call, AContainerWithoutForwardIsUsedThroughCall) {
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

TEST(Call, AListLikeContainerMayBeAUnit) {
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

TEST(Call, ModesAndZeroGradGoThroughTheArrow) {
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

} // namespace calls
} // namespace fsdp::testing
