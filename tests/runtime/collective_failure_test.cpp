// Collectives that fail on one rank: a broken connection, a time-out.

#include "harness/failing_training.h"

#include <gtest/gtest.h>

namespace fsdp::testing::collective_failure {
namespace {

using Moment = detail::FailurePlan::Moment;
using ::testing::IsSubstring;

struct Call {
  std::string what;
  int nth = 1;
};

Break fails(const Call& call, Moment moment, int failing_rank) {
  return [=](Breaking& breaking) {
    const int rank =
        failing_rank < 0 ? breaking.world_size + failing_rank : failing_rank;
    if (breaking.rank == rank) {
      breaking.injection.arm(
          {.what = call.what,
           .nth = call.nth,
           .moment = moment,
           .text = breaking.text});
    }
  };
}

void expect_no_trace(
    const std::vector<Strategy>& strategies,
    const Call& call,
    const std::vector<Moment>& moments = {Moment::kIssue, Moment::kWait}) {
  for (const auto moment : moments) {
    for (const int rank : {0, -1}) {
      expect_failures_leave_no_trace(
          {2, 3}, strategies, fails(call, moment, rank));
    }
  }
}

TEST(CollectiveFailure, GatherInForward) {
  expect_no_trace(kSharded, {"all_gather of unit 'layer0'"});
  expect_no_trace(kSharded, {"all_gather of unit 'layer2'"});
}

TEST(CollectiveFailure, GatherInBackward) {
  expect_no_trace({Strategy::kFullShard}, {"all_gather of unit 'layer1'", 2});
}

TEST(CollectiveFailure, FirstReduction) {
  expect_no_trace(kSharded, {"reduce_scatter of unit"});
  expect_no_trace({Strategy::kNoShard}, {"all_reduce of unit"});
}

TEST(CollectiveFailure, LastReduction) {
  expect_no_trace(kSharded, {"reduce_scatter of unit", 4});
  expect_no_trace({Strategy::kNoShard}, {"all_reduce of unit", 4});
}

TEST(CollectiveFailure, Settlement) {
  expect_no_trace(kAllStrategies, {"settlement of gradients"});
}

TEST(CollectiveFailure, EndOfTheSettlement) {
  expect_no_trace(kAllStrategies, {"end of the settlement"}, {Moment::kIssue});
}

TEST(CollectiveFailure, FiveTimesInARowOnAlternatingRanks) {
  const std::vector<std::string> calls = {
      "all_gather of unit 'layer1'",
      "settlement of gradients",
      "reduce_scatter of unit 'layer2'",
      "all_gather of unit 'layer3'",
      "reduce_scatter of unit 'layer0'"};
  for (const auto moment : {Moment::kIssue, Moment::kWait}) {
    expect_failures_leave_no_trace(
        {2, 3},
        kSharded,
        [&](Breaking& breaking) {
          const auto attempt = static_cast<size_t>(breaking.attempt);
          fails(
              {calls[attempt % calls.size()]},
              moment,
              breaking.attempt % breaking.world_size)(breaking);
        },
        {.steps = 2, .failures = 5});
  }
}

TEST(CollectiveFailure, OnAllRanksAtOnce) {
  for (const auto* call :
       {"all_gather of unit 'layer2'",
        "reduce_scatter of unit 'layer2'",
        "settlement of gradients"}) {
    expect_failures_leave_no_trace({2, 3}, kSharded, [&](Breaking& breaking) {
      fails({call}, Moment::kIssue, breaking.rank)(breaking);
    });
  }
}

TEST(CollectiveFailure, TogetherWithAnExceptionOfTheProgram) {
  expect_failures_leave_no_trace({2, 3}, kSharded, [](Breaking& breaking) {
    fails({"all_gather of unit 'layer3'"}, Moment::kWait, 0)(breaking);
    if (breaking.rank == 1) {
      breaking.model.place = Place::kForward;
      breaking.model.layer = 2;
      breaking.model.text = breaking.text;
    }
  });
}

/// A rank that fails after all have met at the end of the settlement is behind;
/// the others learn of it in their next step, and training goes on after.
TEST(CollectiveFailure, AfterTheEndOfTheSettlementTheOthersLearnOfItNext) {
  for (const int failing : {0, 1}) {
    in_worlds({2, 3}, kAllStrategies, [&](const World& world, Strategy s) {
      const auto m = build_model();
      const auto injection = std::make_shared<Injection>();
      ShardedTensors net(
          m->units(), failing_world(world, injection), Options().strategy(s));
      const auto pass = [&] {
        // Another order than that of registration, learned in the first pass.
        net.call([&] {
             auto y = m->x;
             for (const size_t i : {2, 0, 3, 1}) {
               y = torch::tanh(m->layers[i](y));
             }
             return y.pow(2).mean();
           })
            .backward();
      };
      if (world.rank() == failing) {
        injection->arm(
            {.what = "end of the settlement",
             .moment = Moment::kWait,
             .text = "cable cut"});
        EXPECT_PRED_FORMAT2(IsSubstring, "cable cut", error_of(pass));
        EXPECT_FALSE(m->weight(1).grad().defined());
      } else {
        pass();
        const Snapshot before(net);
        EXPECT_PRED_FORMAT2(IsSubstring, "cable cut", error_of(pass));
        before.expect_unchanged(net);
      }
      for (const auto& parameter : net.parameters()) {
        parameter.mutable_grad().reset();
      }
      for (int step = 0; step < 3; ++step) {
        EXPECT_EQ(error_of(pass), "");
      }
      EXPECT_TRUE(m->weight(1).grad().defined());
    });
  }
}

TEST(CollectiveFailure, InEvaluation) {
  in_worlds({2, 3}, kSharded, [](const World& world, Strategy strategy) {
    const auto m = build_model();
    const auto injection = std::make_shared<Injection>();
    ShardedTensors net(
        m->units(),
        failing_world(world, injection),
        Options().strategy(strategy));
    const torch::NoGradGuard no_grad;
    const auto evaluate = [&] {
      return net.call([&] { return m->loss(torch::arange(kRows)); });
    };
    const auto expected = evaluate();
    const Snapshot before(net);
    for (int i = 0; i < 3; ++i) {
      if (world.rank() == i % world.size()) {
        injection->arm({.what = "layer3", .text = "cable cut"});
      }
      EXPECT_PRED_FORMAT2(IsSubstring, "cable cut", error_of(evaluate));
      injection->disarm();
      before.expect_unchanged(net);
    }
    EXPECT_TRUE(at::equal(evaluate(), expected));
  });
}

TEST(CollectiveFailure, WhileAllParametersAreMadeWhole) {
  in_worlds({2, 3}, kSharded, [](const World& world, Strategy strategy) {
    const auto m = build_model();
    const auto plain = build_model();
    const auto injection = std::make_shared<Injection>();
    ShardedTensors net(
        m->units(),
        failing_world(world, injection),
        Options().strategy(strategy));
    const Snapshot before(net);
    const std::vector<std::function<void()>> ways = {
        [&] { const auto scope = net.whole_parameters(); },
        [&] { net.unshard(); }};
    for (const auto& way : ways) {
      for (const auto moment : {Moment::kIssue, Moment::kWait}) {
        if (world.rank() == 1) {
          injection->arm(
              {.what = "layer2", .moment = moment, .text = "cable cut"});
        }
        EXPECT_PRED_FORMAT2(IsSubstring, "cable cut", error_of(way));
        injection->disarm();
        before.expect_unchanged(net);
      }
    }
    for (const auto& [name, value] : whole_values(net)) {
      if (name == "layer3.weight") {
        EXPECT_TRUE(at::equal(value, plain->weight(3)));
      }
    }
    net.unshard();
    net.call([&] { return m->loss(torch::arange(kRows)); }).backward();
    net.reshard();
    EXPECT_EQ(net.memory().gathered_bytes, 0);
  });
}

TEST(CollectiveFailure, WhileGradientsAreClipped) {
  in_worlds({2, 3}, kAllStrategies, [](const World& world, Strategy strategy) {
    const auto m = build_model();
    const auto injection = std::make_shared<Injection>();
    ShardedTensors net(
        m->units(),
        failing_world(world, injection),
        Options().strategy(strategy));
    const auto pass = [&] {
      net.call([&] { return m->loss(torch::arange(kRows)); }).backward();
    };
    pass();
    const auto expected = net.clip_grad_norm_(1e9);
    const Snapshot before(net);
    for (int i = 0; i < 2; ++i) {
      if (world.rank() == i) {
        injection->arm({.what = "clip_grad_norm_", .text = "cable cut"});
      }
      EXPECT_PRED_FORMAT2(IsSubstring, "cable cut", error_of([&] {
                            net.clip_grad_norm_(1e-3);
                          }));
      injection->disarm();
      before.expect_unchanged(net);
      EXPECT_EQ(net.clip_grad_norm_(1e9), expected);
    }
    pass();
    EXPECT_EQ(net.clip_grad_norm_(1e9), 2 * expected);
  });
}

TEST(CollectiveFailure, InATouchOfTheProgram) {
  in_worlds({2, 3}, kSharded, [](const World& world, Strategy strategy) {
    const auto m = build_model();
    const auto plain = build_model();
    const auto injection = std::make_shared<Injection>();
    ShardedTensors net(
        m->units(),
        failing_world(world, injection),
        Options().strategy(strategy));
    const Snapshot before(net);
    float first = 0;
    const auto read = [&] {
      net.call([&] {
        const auto touch = fsdp::touch(m->weight(2));
        first = *m->weight(2).const_data_ptr<float>();
      });
    };
    for (const auto moment : {Moment::kIssue, Moment::kWait}) {
      if (world.rank() == 1) {
        injection->arm(
            {.what = "layer2", .moment = moment, .text = "cable cut"});
      }
      // When the wait fails the others have what they need, and hear of it at
      // their next touch.
      const auto text = error_of(read);
      const auto later = text.empty() ? error_of(read) : std::string();
      EXPECT_EQ(text.empty(), moment == Moment::kWait && world.rank() != 1);
      EXPECT_PRED_FORMAT2(IsSubstring, "cable cut", text + later);
      injection->disarm();
      before.expect_unchanged(net);
    }
    read();
    EXPECT_EQ(first, plain->weight(2)[0][0].item<float>());
  });
}

TEST(CollectiveFailure, InTheRecomputationOfValuesOfWeights) {
  in_worlds({2, 3}, {Strategy::kFullShard}, [](const World& world, Strategy s) {
    const auto m = build_model();
    const auto injection = std::make_shared<Injection>();
    ShardedTensors net(
        m->units(), failing_world(world, injection), Options().strategy(s));
    const auto pass = [&] {
      net.call([&] {
           auto y = m->x;
           for (auto& layer : m->layers) {
             const auto scaled = layer->weight / layer->weight.norm();
             y = torch::tanh(torch::linear(y, scaled, layer->bias));
           }
           return y.pow(2).mean();
         })
          .backward();
    };
    pass();
    const auto once = m->weight(1).grad().clone();
    const Snapshot before(net);
    for (const auto moment : {Moment::kIssue, Moment::kWait}) {
      if (world.rank() == 0) {
        injection->arm(
            {.what = "all_gather of unit 'layer1'",
             .nth = 2,
             .moment = moment,
             .text = "cable cut"});
      }
      EXPECT_PRED_FORMAT2(IsSubstring, "cable cut", error_of(pass));
      injection->disarm();
      before.expect_unchanged(net);
    }
    pass();
    EXPECT_TRUE(at::equal(m->weight(1).grad(), once + once));
  });
}

} // namespace
} // namespace fsdp::testing::collective_failure
