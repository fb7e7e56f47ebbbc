// Ways to call a net.

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
namespace calls {

namespace nn = torch::nn;
using at::Tensor;

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

TEST(Call, PassesReferencesThrough) {
  with_net([](auto& net, auto& plain) {
    const auto x = wave({4, 3});
    Tensor result;
    net.call(&FacesImpl::into, result, x);
    expect_near(result, plain.forward(x));
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

} // namespace calls
} // namespace fsdp::testing
