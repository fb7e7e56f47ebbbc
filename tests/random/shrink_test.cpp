#include "random/shrink.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace fsdp::random_models {
namespace {

constexpr int kNoLimit = 100'000;

bool has(const Spec& spec, Kind kind, int width) {
  return std::any_of(
      spec.layers.begin(), spec.layers.end(), [&](const LayerSpec& layer) {
        return layer.kind == kind && layer.out >= width;
      });
}

TEST(Shrink, CandidatesAreNormalAndSimpler) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const auto spec = draw(seed);
    for (const auto& candidate : simpler(spec)) {
      auto normal = candidate;
      normalize(normal);
      ASSERT_EQ(normal, candidate) << to_text(candidate);
      ASSERT_LT(cost(candidate), cost(spec)) << to_text(candidate);
    }
  }
}

TEST(Shrink, KeepsOnlyWhatTheFailureNeeds) {
  const auto fails = [](const Spec& spec) {
    return has(spec, Kind::kLstm, 5) && spec.world >= 3 && spec.steps >= 2;
  };
  int found = 0;
  for (uint64_t seed = 0; seed < 3'000 && found < 20; ++seed) {
    const auto spec = draw(seed);
    if (!fails(spec)) {
      continue;
    }
    ++found;
    auto shrunk = shrink(spec, fails, kNoLimit).spec;
    EXPECT_TRUE(fails(shrunk));
    shrunk.seed = 0; // is no complication
    EXPECT_EQ(to_text(shrunk), "world=3 steps=2 lstm:out=5") << to_text(spec);
  }
  EXPECT_EQ(found, 20);
}

TEST(Shrink, KeepsLayersThatReferToOneAnother) {
  const auto fails = [](const Spec& spec) {
    return std::any_of(
        spec.layers.begin(), spec.layers.end(), [&](const LayerSpec& layer) {
          return layer.kind == Kind::kTied &&
              spec.layers[static_cast<size_t>(layer.from)].kind == Kind::kGru;
        });
  };
  int found = 0;
  for (uint64_t seed = 0; seed < 3'000 && found < 10; ++seed) {
    const auto spec = draw(seed);
    if (!fails(spec)) {
      continue;
    }
    ++found;
    auto shrunk = shrink(spec, fails, kNoLimit).spec;
    shrunk.seed = 0;
    EXPECT_EQ(to_text(shrunk), "gru tied") << to_text(spec);
  }
  EXPECT_EQ(found, 10);
}

TEST(Shrink, KeepsPatternsOfMicroBatches) {
  auto spec = parse("seed=3 world=2 steps=3 micro=snn,ss,nns linear:in=4 norm");
  const auto shrunk = shrink(
      spec,
      [](const Spec& each) {
        return each.micro.size() > 1 &&
            each.micro[1].find('n') != std::string::npos;
      },
      kNoLimit);
  EXPECT_EQ(to_text(shrunk.spec), "seed=3 micro=s,n");
}

TEST(Shrink, KeepsAFailingStep) {
  auto spec = draw(1);
  spec.world = 4;
  spec.fail_step = 0;
  spec.fail_rank = 2;
  spec.fail_backward = true;
  normalize(spec);
  auto shrunk = shrink(
                    spec,
                    [](const Spec& each) {
                      return each.fail_step >= 0 && each.fail_backward &&
                          each.fail_rank > 0;
                    },
                    kNoLimit)
                    .spec;
  shrunk.seed = 0;
  EXPECT_EQ(to_text(shrunk), "world=2 fail_step=0 fail_rank=1 fail_backward=1");
}

TEST(Shrink, StopsWhereNothingSimplerFailsAndAfterTheLastTry) {
  const auto spec = draw(5);
  const auto never = shrink(
      spec, [](const Spec&) { return false; }, kNoLimit);
  EXPECT_EQ(never.spec, spec);
  EXPECT_EQ(never.tries, std::ssize(simpler(spec)));
  int calls = 0;
  const auto always = shrink(
      spec, [&calls](const Spec&) { return ++calls > 0; }, 7);
  EXPECT_EQ(calls, 7);
  EXPECT_LT(cost(always.spec), cost(spec));
  EXPECT_EQ(
      cost(shrink(
               spec, [](const Spec&) { return true; }, kNoLimit)
               .spec),
      cost(Spec()));
}

} // namespace
} // namespace fsdp::random_models
