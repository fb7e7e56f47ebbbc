// What each rank is told of a failure, and failures in unusual places.

#include "harness/failing_training.h"

#include <gtest/gtest.h>

#include <chrono>

namespace fsdp::testing::failure_report {
namespace {

using at::Tensor;
using ::testing::IsSubstring;

/// One rank's net.
struct Rank {
  Rank(const World& world, Strategy strategy)
      : net(m->units(), world, Options().strategy(strategy)) {}

  void pass() {
    net.call([&] { return m->loss(torch::arange(kRows)); }).backward();
  }
  void expect_pass_works() {
    EXPECT_EQ(error_of([&] { pass(); }), "");
    EXPECT_TRUE(m->weight(1).grad().defined());
  }

  std::shared_ptr<BreakableLayers> m = build_model<BreakableLayers>();
  ShardedTensors net;
};

TEST(FailureReport, PeersGetADistBackendErrorWithTheRankAndTheText) {
  in_worlds({2, 3}, kAllStrategies, [](const World& world, Strategy strategy) {
    Rank rank(world, strategy);
    const bool breaks = world.rank() == 1;
    try {
      rank.net
          .call([&] {
            const auto loss = rank.m->loss(torch::arange(kRows));
            return breaks ? loss + torch::ones({2, 3}).mm(torch::ones({2, 3}))
                          : loss;
          })
          .sum()
          .backward();
      ADD_FAILURE() << "no exception";
    } catch (const c10::DistBackendError& error) {
      EXPECT_FALSE(breaks);
      const std::string text = error.what_without_backtrace();
      const auto who = "rank 1/" + std::to_string(world.size()) + " failed: ";
      EXPECT_PRED_FORMAT2(IsSubstring, who, text);
      EXPECT_PRED_FORMAT2(IsSubstring, "mat1 and mat2 shapes", text);
      EXPECT_EQ(text.find("Exception raised from"), std::string::npos) << text;
      EXPECT_EQ(text.find("frame #"), std::string::npos);
    } catch (const c10::Error& error) {
      EXPECT_TRUE(breaks);
      EXPECT_PRED_FORMAT2(
          IsSubstring, "mat1 and mat2 shapes", error.what_without_backtrace());
    }
    rank.expect_pass_works();
  });
}

TEST(FailureReport, AnExceptionKeepsItsTypeOnItsOwnRank) {
  struct Special : std::logic_error {
    using std::logic_error::logic_error;
  };
  in_worlds({1, 2}, kAllStrategies, [](const World& world, Strategy strategy) {
    Rank rank(world, strategy);
    EXPECT_THROW(
        rank.net.call([&] {
          rank.m->loss(torch::arange(kRows));
          throw Special("special");
        }),
        Special);
    const auto loss =
        rank.net.call([&] { return rank.m->loss(torch::arange(kRows)); });
    loss.register_hook([](const Tensor& gradient) {
      throw Special("special");
      return gradient;
    });
    EXPECT_THROW(loss.backward(), Special);
    rank.expect_pass_works();
  });
}

TEST(FailureReport, WhatIsNoStdExceptionIsReportedToo) {
  in_worlds({1, 2, 3}, kAllStrategies, [](const World& world, Strategy s) {
    Rank rank(world, s);
    const Snapshot before(rank.net);
    std::string text;
    try {
      rank.net
          .call([&] {
            const auto loss = rank.m->loss(torch::arange(kRows));
            if (world.rank() == 0) {
              throw 42;
            }
            return loss;
          })
          .backward();
    } catch (int number) {
      EXPECT_EQ(number, 42);
      text = "an exception left a region";
    } catch (const std::exception& error) {
      text = error.what();
    }
    EXPECT_PRED_FORMAT2(IsSubstring, "an exception left a region", text);
    before.expect_unchanged(rank.net);
    rank.expect_pass_works();
  });
}

TEST(FailureReport, AScopeThatAnExceptionLeavesIsReported) {
  in_worlds({1, 2}, kAllStrategies, [](const World& world, Strategy strategy) {
    Rank rank(world, strategy);
    const Snapshot before(rank.net);
    const auto text = error_of([&] {
      const auto region = rank.net.region();
      rank.m->loss(torch::arange(kRows)).backward();
      if (world.rank() == 0) {
        throw std::runtime_error("an exception left a region");
      }
    });
    // A destructor must not throw: others may learn of it at the next call.
    const auto later =
        text.empty() ? error_of([&] { rank.pass(); }) : std::string();
    EXPECT_PRED_FORMAT2(
        IsSubstring, "an exception left a region", text + later);
    before.expect_unchanged(rank.net);
    rank.expect_pass_works();
  });
}

TEST(FailureReport, WhatTheProgramHandlesInsideItsRegionIsNoFailure) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      const auto loss = run.forward([&] {
        const bool breaks = run.sharded() && run.net()->world().rank() == 0;
        const auto text = error_of([&] {
          run.forward([&] {
            if (breaks) {
              throw std::runtime_error("handled");
            }
          });
        });
        EXPECT_EQ(text, breaks ? "handled" : "");
        return m.loss(run.rows());
      });
      loss.backward();
      run.record_gradients("of step " + std::to_string(step));
      run.step();
    }
    run.record_parameters("at the end");
  }));
}

TEST(FailureReport, ARankThatGivesUpEndsTheOthersSoon) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::string> texts(3);
  const auto text = error_of([&] {
    run_as_threads(
        3,
        [&](const World& world) {
          Rank rank(world, Strategy::kFullShard);
          rank.expect_pass_works();
          if (world.rank() == 1) {
            throw std::runtime_error("out of data");
          }
          texts[static_cast<size_t>(world.rank())] =
              error_of([&] { rank.pass(); });
        },
        std::chrono::seconds(20));
  });
  EXPECT_EQ(text, "out of data");
  for (const size_t rank : {0, 2}) {
    EXPECT_PRED_FORMAT2(IsSubstring, "rank 1", texts[rank]);
    EXPECT_PRED_FORMAT2(IsSubstring, "out of data", texts[rank]);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

TEST(FailureReport, ARankThatDoesNotComeIsNamed) {
  std::vector<std::string> texts(2);
  run_as_threads(
      2,
      [&](const World& world) {
        Rank rank(world, Strategy::kFullShard);
        rank.expect_pass_works();
        if (world.rank() == 0) {
          texts[0] = error_of([&] { rank.pass(); });
        } else {
          std::this_thread::sleep_for(std::chrono::milliseconds(600));
          texts[1] = error_of([&] { rank.pass(); });
        }
        rank.expect_pass_works();
      },
      std::chrono::milliseconds(300));
  EXPECT_PRED_FORMAT2(IsSubstring, "all_gather of unit 'layer0'", texts[0]);
  EXPECT_PRED_FORMAT2(IsSubstring, "timed out after 300 ms", texts[0]);
  EXPECT_PRED_FORMAT2(IsSubstring, "not arrived: rank 1", texts[0]);
  EXPECT_PRED_FORMAT2(IsSubstring, "timed out after 300 ms", texts[1]);
}

TEST(FailureReport, BadContentsOnOneRankAreReportedToAll) {
  in_worlds({2, 3}, kSharded, [](const World& world, Strategy strategy) {
    Rank rank(world, strategy);
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

TEST(FailureReport, TheSameGraphCanBeTriedAgain) {
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

TEST(FailureReport, WeightsWrittenInAFailedForwardAreAsBefore) {
  in_worlds({1, 2, 3}, kSharded, [](const World& world, Strategy strategy) {
    Rank rank(world, strategy);
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
        });
      });
      // Ranks that are through already learn of it in their next call.
      const auto later =
          text.empty() ? error_of([&] { rank.pass(); }) : std::string();
      EXPECT_PRED_FORMAT2(IsSubstring, "broken", text + later);
      before.expect_unchanged(rank.net);
    }
    rank.expect_pass_works();
  });
}

TEST(FailureReport, InTheRecomputationOfACheckpoint) {
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
    Rank rank(world, s);
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

TEST(FailureReport, InOneOfTwoNetsThatRunTogether) {
  in_worlds({1, 2}, kAllStrategies, [](const World& world, Strategy strategy) {
    Rank first(world, strategy);
    Rank second(world, strategy);
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

TEST(FailureReport, InAMicroBatchWithoutSynchronisation) {
  in_worlds({1, 2, 3}, kAllStrategies, [](const World& world, Strategy s) {
    Rank rank(world, s);
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
    rank.expect_pass_works();
  });
}

} // namespace
} // namespace fsdp::testing::failure_report
