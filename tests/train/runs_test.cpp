// Neighbours of a flat group are updated in one run: see [Note: Runs].

#include "train/runs.h"
#include "runtime/flat_group.h"
#include "runtime/shard_place.h"
#include "runtime/unit_storage.h"
#include "train/training.h"
#include "train/updates.h"

#include <algorithm>
#include <functional>

namespace fsdp::testing {
namespace runs {

namespace optim = torch::optim;
using at::Tensor;
using detail::Padding;
using detail::Update;

/// On two ranks: the first two belong to rank 0, the others to rank 1.
const std::vector<std::vector<int64_t>> kSizes = {{100}, {8, 16}, {70}, {64}};

/// The updates of `parameters`, with one state each.
struct Step {
  explicit Step(const std::vector<Tensor>& parameters, int64_t step = 1)
      : state(parameters.size()) {
    updates = detail::updates_of("Test", {parameters});
    for (auto& update : updates) {
      const auto place = std::find_if(
          parameters.begin(), parameters.end(), [&](const Tensor& each) {
            return each.is_same(update.parameter);
          });
      update.state.push_back(&state[place - parameters.begin()]);
      update.steps = step;
    }
    updates = detail::take_distinct(updates);
  }

  /// Lengths of the runs, in elements.
  std::vector<int64_t> run(Padding padding = Padding::kInRuns) {
    std::vector<int64_t> numels;
    detail::apply_updates(updates, padding, [&](detail::Runs& runs) {
      for (const auto& parameter : runs.parameters) {
        numels.push_back(parameter.numel());
      }
    });
    return numels;
  }

  std::vector<Update> updates;
  std::vector<Tensor> state;
};

/// Runs `body` on two ranks after a backward pass over `used` tensors.
void after_backward(
    const std::vector<size_t>& used,
    const std::function<void(const World&, Tensors&, ShardedTensors&)>& body) {
  on_ranks(2, [&](const World& world) {
    Tensors tensors(kSizes);
    ShardedTensors net(tensors.units(), world);
    net.call([&] {
         auto sum = torch::zeros({});
         for (const auto i : used) {
           sum = sum + (tensors.values[i] * tensors.gradients[i]).sum();
         }
         return sum;
       })
        .backward();
    body(world, tensors, net);
  });
}

using Numels = std::vector<int64_t>;

TEST(Runs, NeighboursFormOne) {
  after_backward({0, 1, 2, 3}, [](const World& world, Tensors& tensors, auto&) {
    const auto expected = world.rank() == 0 ? Numels{256} : Numels{192};
    EXPECT_EQ(Step(tensors.values).run(), expected);
  });
}

TEST(Runs, TheOrderInWhichParametersAreListedDoesNotMatter) {
  after_backward({0, 1, 2, 3}, [](const World& world, Tensors& tensors, auto&) {
    const auto& t = tensors.values;
    const auto expected = world.rank() == 0 ? Numels{256} : Numels{192};
    EXPECT_EQ(Step({t[3], t[1], t[0], t[2]}).run(), expected);
  });
}

TEST(Runs, WhatAPaddingWouldSpoilStaysApart) {
  after_backward({0, 1, 2, 3}, [](const World& world, Tensors& tensors, auto&) {
    // 100 = 64 and a tail of 36 in a copy; likewise 70.
    const auto expected =
        world.rank() == 0 ? Numels{64, 64, 128} : Numels{64, 64, 64};
    EXPECT_EQ(Step(tensors.values).run(Padding::kLeftAlone), expected);
  });
}

TEST(Runs, AParameterWithoutGradientIsNotCovered) {
  after_backward({0, 1, 3}, [](const World& world, Tensors& tensors, auto&) {
    const auto expected = world.rank() == 0 ? Numels{256} : Numels{64};
    EXPECT_EQ(Step(tensors.values).run(), expected);
  });
}

TEST(Runs, OneThatTheOptimizerDoesNotHaveIsNotCovered) {
  after_backward({0, 1, 2, 3}, [](const World& world, Tensors& tensors, auto&) {
    const auto& t = tensors.values;
    const auto expected = world.rank() == 0 ? Numels{128} : Numels{192};
    EXPECT_EQ(Step({t[1], t[2], t[3]}).run(), expected);
  });
}

TEST(Runs, DifferentStepsStayApart) {
  after_backward({0, 1, 2, 3}, [](const World& world, Tensors& tensors, auto&) {
    Step step(tensors.values);
    for (auto& update : step.updates) {
      update.steps += update.parameter.is_same(tensors.values[1]) ? 1 : 0;
    }
    const auto expected = world.rank() == 0 ? Numels{64, 64, 128} : Numels{192};
    EXPECT_EQ(step.run(), expected);
  });
}

TEST(Runs, GradientsOfTheProgramStayApart) {
  after_backward({0, 1, 2, 3}, [](const World& world, Tensors& tensors, auto&) {
    auto& grad = tensors.values[3].mutable_grad();
    grad = grad.clone();
    const auto expected = world.rank() == 0 ? Numels{256} : Numels{64, 64, 64};
    EXPECT_EQ(Step(tensors.values).run(), expected);
  });
}

TEST(Runs, OrdinaryTensorsStayApart) {
  const auto memory = torch::zeros({128});
  const auto gradients = torch::zeros({128});
  std::vector<Tensor> halves;
  for (int64_t i = 0; i < 2; ++i) {
    halves.push_back(memory.slice(0, 64 * i, 64 * (i + 1)).detach());
    halves.back().requires_grad_();
    halves.back().mutable_grad() = gradients.slice(0, 64 * i, 64 * (i + 1));
  }
  EXPECT_EQ(Step(halves).run(), (Numels{64, 64}));
}

TEST(Runs, StateLiesSideBySideAndIsNoView) {
  after_backward({0, 1, 2, 3}, [](const World& world, Tensors& tensors, auto&) {
    Step step(tensors.values);
    step.run();
    const auto first = world.rank() == 0 ? 0U : 2U;
    const auto& a = step.state[first];
    const auto& b = step.state[first + 1];
    EXPECT_TRUE(a.is_alias_of(b));
    EXPECT_EQ(b.storage_offset() - a.storage_offset(), 128);
    for (const auto& state : step.state) {
      EXPECT_FALSE(state.is_view());
      EXPECT_FALSE(state.requires_grad());
    }
    a.detach_(); // which views refuse
  });
}

TEST(Runs, StateFromElsewhereIsMovedTogetherWithItsValues) {
  after_backward({0, 1, 2, 3}, [](const World& world, Tensors& tensors, auto&) {
    Step step(tensors.values);
    for (size_t i = 0; i < step.state.size(); ++i) {
      step.state[i] =
          torch::full(tensors.values[i].sizes(), static_cast<double>(i));
    }
    const auto expected = world.rank() == 0 ? Numels{256} : Numels{192};
    EXPECT_EQ(step.run(), expected);
    const auto first = world.rank() == 0 ? 0U : 2U;
    EXPECT_TRUE(step.state[first].is_alias_of(step.state[first + 1]));
    for (size_t i = first; i < first + 2; ++i) {
      EXPECT_TRUE(step.state[i].eq(static_cast<double>(i)).all().item<bool>());
    }
  });
}

/// Three steps over 63 * 64 elements, in tensors of `numel` each.
template <class Optimizer, class Options>
Tensor trained_in_pieces(int64_t numel, const Options& options) {
  const auto pieces_of = [&](double frequency) {
    return wave({63 * 64}, frequency).split(numel);
  };
  std::vector<Tensor> pieces;
  for (const auto& piece : pieces_of(0.7)) {
    pieces.push_back(piece.clone().requires_grad_());
  }
  Optimizer optimizer(pieces, options);
  for (const double frequency : {1.3, 2.3, 3.3}) {
    const auto gradients = pieces_of(frequency);
    for (size_t i = 0; i < pieces.size(); ++i) {
      pieces[i].mutable_grad() = gradients[i].clone();
    }
    optimizer.step();
  }
  return torch::cat(pieces).detach();
}

template <class Optimizer, class Options>
void expect_same_bits_everywhere(const Options& options) {
  const auto whole = trained_in_pieces<Optimizer>(63 * 64, options);
  for (const int64_t numel : {63, 65, 7, 1000}) {
    EXPECT_TRUE(at::equal(trained_in_pieces<Optimizer>(numel, options), whole))
        << numel;
  }
}

TEST(Runs, AnElementHasTheSameBitsWhereverItLies) { // see [Note: Vector tails]
  expect_same_bits_everywhere<AdamW>(optim::AdamWOptions(0.01));
  expect_same_bits_everywhere<Adam>(optim::AdamOptions(0.01).weight_decay(0.1));
  expect_same_bits_everywhere<SGD>(
      optim::SGDOptions(0.01).momentum(0.9).weight_decay(0.1));
}

/// The elements of this rank's slice that no parameter owns.
Tensor padding_of(const std::vector<Tensor>& shards) {
  const auto& first =
      *std::find_if(shards.begin(), shards.end(), [](const Tensor& shard) {
        return shard.numel() > 0;
      });
  const auto numel =
      static_cast<int64_t>(first.storage().nbytes() / first.element_size());
  const auto slice =
      detail::tensor_on_storage_of(first, first.scalar_type(), {numel}, 0);
  auto owned = torch::zeros({numel}, torch::kBool);
  for (const auto& shard : shards) {
    if (shard.is_alias_of(first)) {
      const auto begin = shard.storage_offset();
      owned.slice(0, begin, begin + shard.numel()).fill_(true);
    }
  }
  return slice.masked_select(owned.logical_not());
}

template <class Optimizer, class Options>
void expect_zero_padding(const Options& options) {
  after_backward(
      {0, 1, 2, 3}, [&](const World&, Tensors& tensors, ShardedTensors& net) {
        Optimizer optimizer(tensors.values, options);
        for (int step = 0; step < 3; ++step) {
          optimizer.step();
          net.clip_grad_norm_(0.5);
        }
        const auto padding = padding_of(tensors.values);
        EXPECT_EQ(padding.count_nonzero().template item<int64_t>(), 0);
        EXPECT_FALSE(padding.isnan().any().template item<bool>());
      });
}

TEST(Runs, PaddingStaysZero) {
  expect_zero_padding<AdamW>(
      optim::AdamWOptions(0.1).weight_decay(0.5).amsgrad(true));
  expect_zero_padding<AdamW>(optim::AdamWOptions(0.1).eps(0));
  expect_zero_padding<AdamW>(optim::AdamWOptions(0.1).eps(1e-40));
  expect_zero_padding<Adam>(optim::AdamOptions(0.1).weight_decay(0.5));
  expect_zero_padding<SGD>(
      optim::SGDOptions(0.1).weight_decay(0.5).momentum(0.9));
}

} // namespace runs
} // namespace fsdp::testing
