// Gathers that start before their units are read, seen from the communicator.

#include "api/counting_communicator.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>

namespace fsdp::testing {
namespace net_prefetch {

namespace nn = torch::nn;
using at::Tensor;

constexpr int64_t kDepth = 5;
constexpr int64_t kWidth = 16;
constexpr int64_t kLayer = kWidth * kWidth; // elements

/// Layers in an order that a step may change, and a note after each.
struct ChainImpl : nn::Module {
  ChainImpl() {
    for (int64_t i = 0; i < kDepth; ++i) {
      layers->push_back(
          nn::Linear(nn::LinearOptions(kWidth, kWidth).bias(false)));
      order.push_back(i);
    }
  }
  Tensor forward(Tensor x) {
    for (const auto i : order) {
      const auto name = std::to_string(i);
      x = torch::tanh(
          layers[static_cast<size_t>(i)]->as<nn::Linear>()->forward(x));
      if (fails_behind == i) {
        throw std::runtime_error("bad luck");
      }
      if (note) {
        note("forward of " + name);
        if (x.requires_grad()) {
          x.register_hook([this, name](const Tensor& /*gradient*/) {
            note("gradient reaches " + name);
          });
        }
      }
    }
    return x;
  }
  nn::ModuleList layers = register_module("layers", nn::ModuleList());
  std::vector<int64_t> order;
  std::function<void(const std::string&)> note;
  int64_t fails_behind = -1;
};

using Net = FullyShardedDataParallel<ChainImpl>;

auto make_chain() {
  return std::make_shared<ChainImpl>();
}

std::string gather_of(int64_t layer) {
  return "all_gather of unit 'layers." + std::to_string(layer) + "'";
}

/// A net on ranks that gather by collectives, and the order of its calls.
struct Traced {
  explicit Traced(const World& world, int64_t slots = 2)
      : counter(std::make_shared<CountingCommunicator>(world)),
        net(seeded(make_chain),
            World(counter),
            Options().units(each<nn::Linear>()).slots(slots)) {
    net->note = [this](const std::string& what) {
      counter->notes().push_back(what);
    };
  }

  Tensor forward() { return net(wave({2, kWidth}).requires_grad_()); }
  void train() {
    forward().sum().backward();
    net->zero_grad();
  }
  void evaluate() {
    const torch::NoGradGuard no_grad;
    net(wave({2, kWidth}));
  }
  /// What was called, since the last time.
  CountingCommunicator::Notes take_notes() {
    return std::exchange(counter->notes(), {});
  }

  std::shared_ptr<CountingCommunicator> counter;
  Net net;
};

size_t place(
    const CountingCommunicator::Notes& notes,
    const std::string& what) {
  const auto found = std::find(notes.begin(), notes.end(), what);
  EXPECT_NE(found, notes.end()) << what;
  return static_cast<size_t>(found - notes.begin());
}

/// The part of a step that is its backward pass.
CountingCommunicator::Notes backward_of(
    const CountingCommunicator::Notes& notes) {
  const auto last = place(notes, "forward of " + std::to_string(kDepth - 1));
  return {notes.begin() + static_cast<int64_t>(last) + 1, notes.end()};
}

/// Whether the gather of `next` starts before `layer` is done with.
bool is_ahead_in_forward(
    const CountingCommunicator::Notes& notes,
    int64_t layer,
    int64_t next) {
  return place(notes, gather_of(next)) <
      place(notes, "forward of " + std::to_string(layer));
}

void expect_all_ahead_in_forward(const CountingCommunicator::Notes& notes) {
  for (int64_t i = 0; i + 1 < kDepth; ++i) {
    EXPECT_TRUE(is_ahead_in_forward(notes, i, i + 1)) << i;
  }
}

void expect_all_ahead_in_backward(const CountingCommunicator::Notes& step) {
  const auto notes = backward_of(step);
  // The last layer is whole from forward, and so is the one before.
  for (int64_t i = kDepth - 3; i >= 0; --i) {
    EXPECT_LT(
        place(notes, gather_of(i)),
        place(notes, "gradient reaches " + std::to_string(i)))
        << i;
  }
}

TEST(NetPrefetch, FromTheSecondStepOnUnitsAreGatheredAhead) {
  on_ranks(2, [](const World& world) {
    Traced traced(world);
    traced.train();
    const auto first = traced.take_notes();
    for (int64_t i = 0; i + 1 < kDepth; ++i) {
      EXPECT_FALSE(is_ahead_in_forward(first, i, i + 1)) << i;
    }
    expect_all_ahead_in_backward(first); // the reverse of forward
    for (int step = 1; step < 4; ++step) {
      traced.train();
      const auto notes = traced.take_notes();
      expect_all_ahead_in_forward(notes);
      expect_all_ahead_in_backward(notes);
    }
  });
}

TEST(NetPrefetch, StaysWithinTheSlots) {
  constexpr int64_t kBytes = kLayer * 4;
  for (const int64_t slots : {1, 2, 3}) {
    on_ranks(2, [&](const World& world) {
      Traced traced(world, slots);
      std::vector<int64_t> gathers;
      for (int step = 0; step < 4; ++step) {
        traced.train();
        traced.evaluate();
        EXPECT_EQ(traced.net.memory().peak_gathered_bytes, slots * kBytes);
        EXPECT_EQ(traced.net.memory().gathered_bytes, 0);
        gathers.push_back(traced.counter->count("all_gather"));
        traced.take_notes();
      }
      EXPECT_EQ(gathers, std::vector<int64_t>(4, gathers[0])); // none in vain
    });
  }
}

TEST(NetPrefetch, OneSlotGathersNothingAhead) {
  on_ranks(2, [](const World& world) {
    Traced traced(world, 1);
    for (int step = 0; step < 3; ++step) {
      traced.train();
      const auto notes = traced.take_notes();
      for (int64_t i = 0; i + 1 < kDepth; ++i) {
        EXPECT_FALSE(is_ahead_in_forward(notes, i, i + 1)) << i;
      }
    }
  });
}

TEST(NetPrefetch, AStepThatDepartsIsRecordedAnew) {
  on_ranks(2, [](const World& world) {
    Traced traced(world);
    traced.train();
    traced.train();
    traced.take_notes();
    const std::vector<int64_t> order = {3, 0, 2, 4, 1};
    traced.net->order = order;
    traced.train();
    traced.take_notes();
    traced.train();
    const auto notes = traced.take_notes();
    for (size_t i = 0; i + 1 < order.size(); ++i) {
      EXPECT_TRUE(is_ahead_in_forward(notes, order[i], order[i + 1])) << i;
    }
  });
}

TEST(NetPrefetch, EvaluationBetweenTrainingStepsDoesNotDisturb) {
  on_ranks(2, [](const World& world) {
    Traced traced(world);
    traced.train();
    for (int step = 0; step < 3; ++step) {
      traced.net->order = {0, 1, 2}; // a part of the model
      traced.evaluate();
      traced.net->order = {0, 1, 2, 3, 4};
      traced.take_notes();
      traced.train();
      const auto notes = traced.take_notes();
      expect_all_ahead_in_backward(notes);
      for (int64_t i = 0; i < 2; ++i) {
        EXPECT_TRUE(is_ahead_in_forward(notes, i, i + 1)) << i;
      }
      EXPECT_TRUE(is_ahead_in_forward(notes, 3, 4));
    }
  });
}

TEST(NetPrefetch, AfterAFailedStepOrdersAreRecordedAnew) {
  on_ranks(2, [](const World& world) {
    Traced traced(world);
    for (int rank = 0; rank < 2; ++rank) {
      traced.train();
      traced.train();
      traced.net->fails_behind = world.rank() == rank ? 2 : -1;
      EXPECT_TRUE(contains(error_of([&] { traced.train(); }), "bad luck"));
      traced.net->fails_behind = -1;
      traced.take_notes();
      traced.train();
      EXPECT_FALSE(is_ahead_in_forward(traced.take_notes(), 0, 1));
      traced.train();
      expect_all_ahead_in_forward(traced.take_notes());
    }
  });
}

// Rules.

TEST(NetPrefetch, RulesOfTheProgramHoldFromTheFirstStepOn) {
  on_ranks(2, [](const World& world) {
    Traced traced(world);
    for (int64_t i = 0; i + 1 < kDepth; ++i) {
      traced.net.set_forward_prefetch(
          "layers." + std::to_string(i), {"layers." + std::to_string(i + 1)});
    }
    traced.net.set_backward_prefetch("layers.4", {"layers.0"});
    traced.train();
    const auto notes = traced.take_notes();
    expect_all_ahead_in_forward(notes);
    const auto backward = backward_of(notes);
    EXPECT_LT(
        place(backward, gather_of(0)), place(backward, "gradient reaches 3"));
    traced.net.set_backward_prefetch("layers.4", {}); // taken back
    traced.train();
    const auto again = backward_of(traced.take_notes());
    EXPECT_GT(place(again, gather_of(0)), place(again, "gradient reaches 2"));
  });
}

TEST(NetPrefetch, RulesForUnitsThatDoNotExistAreRefused) {
  on_ranks(2, [](const World& world) {
    Traced traced(world);
    const auto expect_refused = [&](const std::function<void()>& set) {
      const auto error = error_of(set);
      EXPECT_TRUE(contains(error, "no unit 'layers.7'")) << error;
      EXPECT_TRUE(contains(error, "'layers.0', 'layers.1'")) << error;
    };
    auto& net = traced.net;
    expect_refused([&] { net.set_forward_prefetch("layers.7", {"layers.0"}); });
    expect_refused([&] { net.set_forward_prefetch("layers.0", {"layers.7"}); });
    expect_refused([&] { net.set_backward_prefetch("layers.7", {}); });
    expect_refused(
        [&] { net.set_backward_prefetch("layers.0", {"layers.7"}); });
    traced.train(); // nothing has changed
  });
}

// Results.

TEST(NetPrefetch, TrainingInAnyOrderOfModulesIsTheSame) {
  ProgramSettings settings;
  settings.world_sizes = {2, 3};
  settings.options.units(each<nn::Linear>());
  for (const int64_t slots : {1, 2, 3, 8}) {
    settings.options.slots(slots);
    expect_same_program(
        make_chain,
        [&](auto& net, Log& log) {
          std::mt19937 engine(static_cast<unsigned>(slots));
          torch::optim::SGD optimizer(net.parameters(), 0.1);
          for (int step = 0; step < 12; ++step) {
            auto& order = net->order;
            std::shuffle(order.begin(), order.end(), engine);
            if (step % 3 == 2) { // some twice, some not at all
              order[0] = order[1];
            }
            const auto x = log.mine(wave({kRows, kWidth}, 0.7 + step));
            auto loss = net(x).pow(2).mean();
            if (step % 4 != 1) {
              loss.backward();
            }
            log.loss(loss);
            log.gradients(net);
            optimizer.step();
            optimizer.zero_grad();
            order = {0, 1, 2, 3, 4};
          }
          log.parameters(net);
        },
        settings);
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
}

} // namespace net_prefetch
} // namespace fsdp::testing
