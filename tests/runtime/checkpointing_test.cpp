// Activation checkpointing as programs write it: a function that recomputes.

#include "harness/tanh_layers.h"

#include <gtest/gtest.h>

namespace fsdp::testing::checkpointing {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::tensor_list;

using Closure = std::function<Tensor(const Tensor&)>;

/// Computes without a graph, and again with one in backward. The graph outside
/// shows no parameter.
struct Recomputed : Function<Recomputed> {
  static Tensor
  forward(AutogradContext* context, Tensor x, const Closure* closure) {
    context->save_for_backward({x});
    context->saved_data["closure"] = reinterpret_cast<int64_t>(closure);
    const torch::NoGradGuard no_grad;
    return (*closure)(x);
  }
  static tensor_list backward(AutogradContext* context, tensor_list grads) {
    const auto x =
        context->get_saved_variables()[0].detach().set_requires_grad(true);
    const auto* closure = reinterpret_cast<const Closure*>(
        context->saved_data["closure"].toInt());
    Tensor y;
    {
      const torch::AutoGradMode grad_mode(true);
      y = (*closure)(x);
    }
    torch::autograd::backward({y}, {grads[0]});
    return {x.grad(), Tensor()};
  }
};

/// Layers in closures, which a graph may keep.
struct CheckpointedLayers : TanhLayers {
  std::vector<Closure> closures;

  Tensor run(const Closure& closure, const Tensor& y) {
    return Recomputed::apply(
        y.requires_grad() ? y : y.detach().clone().set_requires_grad(true),
        &closure);
  }
};

struct EachLayer : CheckpointedLayers {
  EachLayer() {
    for (auto& layer : layers) {
      closures.emplace_back([layer](const Tensor& y) mutable {
        return torch::tanh(layer->forward(y));
      });
    }
  }
};

TEST(Checkpointing, OfEachLayer) {
  expect_same_training(
      model_with<EachLayer>([](EachLayer& m, const Tensor& rows) {
        auto y = m.input(rows);
        for (const auto& closure : m.closures) {
          y = m.run(closure, y);
        }
        return y.pow(2).mean();
      }));
}

TEST(Checkpointing, OfSomeLayers) {
  expect_same_training(
      model_with<EachLayer>([](EachLayer& m, const Tensor& rows) {
        auto y = torch::tanh(m.layers[0](m.input(rows)));
        y = m.run(m.closures[1], y);
        y = torch::tanh(m.layers[2](y));
        return m.run(m.closures[3], y).pow(2).mean();
      }));
}

TEST(Checkpointing, OfOneLayerInSeveralPlaces) {
  expect_same_training(
      model_with<EachLayer>([](EachLayer& m, const Tensor& rows) {
        auto y = m.input(rows);
        for (const size_t i : {0, 1, 0, 2, 1, 3}) {
          y = m.run(m.closures[i], y);
        }
        return (y + m.layers[1](y)).pow(2).mean();
      }));
}

struct WholeModel : CheckpointedLayers {
  WholeModel() {
    closures.emplace_back([this](const Tensor& y) { return forward(y); });
  }
};

TEST(Checkpointing, OfTheWholeModel) {
  expect_same_training(
      model_with<WholeModel>([](WholeModel& m, const Tensor& rows) {
        return m.run(m.closures[0], m.input(rows)).pow(2).mean();
      }));
}

TEST(Checkpointing, OfTheWholeModelOverSeveralPasses) {
  expect_same_program(program_with<WholeModel>([](WholeModel& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      for (int pass = 1; pass <= 2; ++pass) {
        run.forward([&] {
             return pass *
                 m.run(m.closures[0], m.input(run.rows())).pow(2).mean();
           })
            .backward();
      }
      run.record_gradients("of two passes");
      run.step();
    }
  }));
}

TEST(Checkpointing, InsideABackwardInARegion) {
  expect_same_program(program_with<WholeModel>([](WholeModel& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      run.forward([&] {
        m.run(m.closures[0], m.input(run.rows())).pow(2).mean().backward();
      });
      run.record_gradients("of step " + std::to_string(step));
      run.step();
    }
  }));
}

/// Each level recomputes all deeper ones.
template <size_t kDepth>
struct Nested : CheckpointedLayers {
  Nested() {
    closures.resize(kDepth);
    for (size_t i = 0; i < kDepth; ++i) {
      closures[i] = [this, i](const Tensor& below) {
        const auto y = torch::tanh(layers[i % 4](below));
        return i + 1 < kDepth ? run(closures[i + 1], y) : y;
      };
    }
  }
};

template <size_t kDepth>
void expect_nested(const ParitySettings& settings) {
  expect_same_training(
      model_with<Nested<kDepth>>([](Nested<kDepth>& m, const Tensor& rows) {
        return m.run(m.closures[0], m.input(rows)).pow(2).mean();
      }),
      settings);
}

TEST(Checkpointing, Nested) {
  expect_nested<3>({});
}

TEST(Checkpointing, NestedDeeperThanTheStackOfTheEngine) {
  // Beyond 60 levels the engine goes on in threads of a pool.
  expect_nested<80>(
      {.steps = 2,
       .world_sizes = {1, 2},
       .strategies = {Strategy::kFullShard, Strategy::kShardGradOp}});
}

TEST(Checkpointing, AnUnrelatedPassOpensNoRegion) {
  in_worlds({1, 2}, kSharded, [](const World& world, Strategy strategy) {
    const auto m = build_model<WholeModel>();
    ShardedTensors net(m->units(), world, Options().strategy(strategy));
    const auto other = torch::ones({3}, torch::requires_grad());
    other.register_hook([&](const Tensor& /*gradient*/) {
      EXPECT_EQ(m->weight(1).dim(), 1); // a shard still
    });
    net.call([&] { return m->run(m->closures[0], m->x).sum(); }).backward();
    other.pow(2).sum().backward();
    EXPECT_TRUE(at::equal(other.grad(), torch::full({3}, 2.0)));
  });
}

} // namespace
} // namespace fsdp::testing::checkpointing
