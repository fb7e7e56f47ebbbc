// Failures in unusual places: recomputation, two nets, accumulation, writes.

#include "harness/failing_training.h"

#include <gtest/gtest.h>

namespace fsdp::testing::failure_place {
namespace {

using at::Tensor;
using ::testing::IsSubstring;

TEST(FailurePlace, BadContentsOnOneRankAreReportedToAll) {
  in_worlds({2, 3}, kSharded, [](const World& world, Strategy strategy) {
    BreakableRank rank(world, strategy);
    const auto before = rank.m->weight(2).detach();
    if (world.rank() == 1) {
      rank.m->weight(2).set_data(torch::ones({2, 3}));
    }
    const auto text = error_of([&] { rank.pass(); });
    EXPECT_PRED_FORMAT2(IsSubstring, "parameter 'layer2.weight'", text);
    EXPECT_PRED_FORMAT2(IsSubstring, "another size", text);
    if (world.rank() == 1) {
      rank.m->weight(2).set_data(before);
    }
    rank.expect_pass_works();
  });
}

TEST(FailurePlace, TheSameGraphCanBeTriedAgain) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      bool breaks = run.sharded() &&
          run.net()->world().rank() == step % run.net()->world().size();
      const bool fails = run.sharded();
      const auto loss = run.forward([&] {
        auto y = m.forward(m.input(run.rows()));
        y.register_hook([&](const Tensor& gradient) {
          if (std::exchange(breaks, false)) {
            throw std::runtime_error("for once");
          }
          return gradient;
        });
        return m.forward(y).pow(2).mean();
      });
      const auto text =
          fails ? error_of([&] { loss.backward({}, true); }) : "for once";
      EXPECT_PRED_FORMAT2(IsSubstring, "for once", text);
      loss.backward();
      run.record_gradients("of step " + std::to_string(step));
      run.step();
    }
  }));
}

TEST(FailurePlace, WeightsWrittenInAFailedForwardAreAsBefore) {
  in_worlds({1, 2, 3}, kSharded, [](const World& world, Strategy strategy) {
    BreakableRank rank(world, strategy);
    const Snapshot before(rank.net);
    for (const size_t layer : {0, 2, 3}) {
      const auto text = error_of([&] {
        rank.net.call([&] {
          auto y = rank.m->x;
          for (size_t i = 0; i < 4; ++i) {
            if (world.rank() == world.size() - 1 && i == layer) {
              throw std::runtime_error("broken");
            }
            rank.m->weight(i).data().mul_(0.5);
            y = torch::tanh(rank.m->layers[i](y));
          }
          y.sum().backward(); // nobody comes through
        });
      });
      EXPECT_PRED_FORMAT2(IsSubstring, "broken", text);
      before.expect_unchanged(rank.net);
    }
    rank.expect_pass_works();
  });
}

TEST(FailurePlace, InTheRecomputationOfACheckpoint) {
  using Closure = std::function<Tensor(const Tensor&)>;
  struct Recomputed : torch::autograd::Function<Recomputed> {
    static Tensor forward(
        torch::autograd::AutogradContext* context,
        Tensor x,
        const Closure* closure) {
      context->save_for_backward({x});
      context->saved_data["closure"] = reinterpret_cast<int64_t>(closure);
      return (*closure)(x);
    }
    static torch::autograd::tensor_list backward(
        torch::autograd::AutogradContext* context,
        torch::autograd::tensor_list grads) {
      const auto x =
          context->get_saved_variables()[0].detach().set_requires_grad(true);
      const auto* closure = reinterpret_cast<const Closure*>(
          context->saved_data["closure"].toInt());
      const torch::AutoGradMode grad_mode(true);
      torch::autograd::backward({(*closure)(x)}, {grads[0]});
      return {x.grad(), Tensor()};
    }
  };
  in_worlds({1, 2, 3}, kAllStrategies, [](const World& world, Strategy s) {
    BreakableRank rank(world, s);
    rank.pass();
    const Snapshot before(rank.net);
    int calls = 0;
    const Closure closure = [&](const Tensor& x) {
      if (++calls == 2 && world.rank() == 0) {
        throw std::runtime_error("in the recomputation");
      }
      return rank.m->forward(x);
    };
    const auto text = error_of([&] {
      rank.net
          .call([&] {
            const auto x = rank.m->x.clone().set_requires_grad(true);
            return Recomputed::apply(rank.m->forward(x), &closure).sum();
          })
          .backward();
    });
    EXPECT_PRED_FORMAT2(IsSubstring, "in the recomputation", text);
    before.expect_unchanged(rank.net);
    rank.expect_pass_works();
  });
}

TEST(FailurePlace, InOneOfTwoNetsThatRunTogether) {
  in_worlds({1, 2}, kAllStrategies, [](const World& world, Strategy strategy) {
    BreakableRank first(world, strategy);
    BreakableRank second(world, strategy);
    const auto step = [&] {
      first.net
          .call([&] {
            const auto y = first.m->forward(first.m->x);
            return second.net.call(
                [&] { return second.m->forward(y).pow(2).mean(); });
          })
          .backward();
    };
    step();
    const Snapshot before_first(first.net);
    const Snapshot before_second(second.net);
    for (int i = 0; i < 4; ++i) {
      if (world.rank() == i % world.size()) {
        second.m->place = i < 2 ? Place::kForward : Place::kParameterHook;
        second.m->layer = 2;
        second.m->text = "in the second net";
      }
      const auto text = error_of([&] {
        first.net
            .call([&] {
              first.m->forward(first.m->x);
              return second.net.call(
                  [&] { return second.m->loss(torch::arange(kRows)); });
            })
            .backward();
      });
      EXPECT_PRED_FORMAT2(IsSubstring, "in the second net", text);
      before_first.expect_unchanged(first.net);
      before_second.expect_unchanged(second.net);
      second.m->place = Place::kNowhere;
    }
    EXPECT_EQ(error_of(step), "");
  });
}

TEST(FailurePlace, InAMicroBatchWithoutSynchronisation) {
  in_worlds({1, 2, 3}, kAllStrategies, [](const World& world, Strategy s) {
    BreakableRank rank(world, s);
    rank.pass();
    const Snapshot before(rank.net);
    const auto text = error_of([&] {
      {
        const auto no_sync = rank.net.no_sync();
        rank.pass();
        if (world.rank() == 0) {
          rank.m->place = Place::kParameterHook;
          rank.m->text = "in the second micro-batch";
        }
        rank.pass();
      }
      rank.pass();
    });
    rank.m->place = Place::kNowhere;
    EXPECT_PRED_FORMAT2(IsSubstring, "in the second micro-batch", text);
    before.expect_unchanged(rank.net); // the first micro-batch is dropped too
    EXPECT_PRED_FORMAT2(
        IsSubstring,
        "start the step again from its first micro-batch",
        error_of([&] { rank.pass(); }));
    rank.expect_pass_works();
  });
}

} // namespace
} // namespace fsdp::testing::failure_place
