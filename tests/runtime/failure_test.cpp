// Exceptions of the program on some ranks or on all: every rank learns of them,
// and the next step is as if the failed one had not begun.

#include "harness/failing_training.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>

namespace fsdp::testing::failure {
namespace {

/// Which ranks throw in attempt number `attempt`.
using Who = std::function<bool(const Breaking&)>;

bool first_rank(const Breaking& breaking) {
  return breaking.rank == 0;
}
bool last_rank(const Breaking& breaking) {
  return breaking.rank == breaking.world_size - 1;
}
bool every_rank(const Breaking& /*breaking*/) {
  return true;
}
bool in_turn(const Breaking& breaking) {
  return breaking.rank == breaking.attempt % breaking.world_size;
}

Break throws(Place place, size_t layer, Who who) {
  return [=](Breaking& breaking) {
    breaking.model.backward_in_region = place == Place::kAfterBackward;
    if (who(breaking)) {
      breaking.model.place = place;
      breaking.model.layer = layer;
      breaking.model.text = breaking.text;
    }
  };
}

void expect_no_trace(Place place, size_t layer) {
  for (const auto& who : {first_rank, last_rank, every_rank}) {
    expect_failures_leave_no_trace(
        {1, 2, 3}, kAllStrategies, throws(place, layer, who));
  }
}

TEST(Failure, InTheForwardOfTheFirstLayer) {
  expect_no_trace(Place::kForward, 0);
}

TEST(Failure, InTheForwardOfAMiddleLayer) {
  expect_no_trace(Place::kForward, 2);
}

TEST(Failure, InTheBackwardOfAFunctionAtTheEnd) {
  expect_no_trace(Place::kFunction, 3);
}

TEST(Failure, InTheBackwardOfAFunctionInTheMiddle) {
  expect_no_trace(Place::kFunction, 1);
}

TEST(Failure, InAHookOfAnActivation) {
  expect_no_trace(Place::kActivationHook, 2);
}

TEST(Failure, InAHookOfTheFirstParameterThatGetsAGradient) {
  expect_no_trace(Place::kParameterHook, 3);
}

TEST(Failure, InAHookOfTheLastParameterThatGetsAGradient) {
  expect_no_trace(Place::kParameterHook, 0);
}

TEST(Failure, OfAllRanksAfterABackwardInsideTheRegion) {
  expect_failures_leave_no_trace(
      {1, 2, 3}, kAllStrategies, throws(Place::kAfterBackward, 0, every_rank));
}

TEST(Failure, OnFourRanks) {
  for (const auto place : {Place::kForward, Place::kFunction}) {
    expect_failures_leave_no_trace(
        {4}, kAllStrategies, throws(place, 2, first_rank));
  }
}

TEST(Failure, OfEachRankInAnotherLayer) {
  for (const auto place : {Place::kForward, Place::kFunction}) {
    expect_failures_leave_no_trace(
        {2, 3, 4}, kAllStrategies, [place](Breaking& breaking) {
          throws(
              place, static_cast<size_t>(breaking.rank), every_rank)(breaking);
        });
  }
}

TEST(Failure, OfOneRankInForwardAndOfAnotherInBackward) {
  expect_failures_leave_no_trace(
      {2, 3}, kAllStrategies, [](Breaking& breaking) {
        throws(Place::kForward, 1, first_rank)(breaking);
        throws(Place::kParameterHook, 2, last_rank)(breaking);
      });
}

TEST(Failure, FiveTimesInARow) {
  for (const auto place : {Place::kForward, Place::kParameterHook}) {
    expect_failures_leave_no_trace(
        {1, 2, 3},
        kAllStrategies,
        throws(place, 1, last_rank),
        {.steps = 2, .failures = 5});
  }
}

TEST(Failure, OfAlternatingRanks) {
  for (const auto place :
       {Place::kForward, Place::kFunction, Place::kActivationHook}) {
    expect_failures_leave_no_trace(
        {2, 3},
        kAllStrategies,
        throws(place, 2, in_turn),
        {.steps = 2, .failures = 5});
  }
}

TEST(Failure, InAnotherPlaceEachTime) {
  expect_failures_leave_no_trace(
      {2, 3},
      kAllStrategies,
      [](Breaking& breaking) {
        const auto place = static_cast<Place>(1 + breaking.attempt % 4);
        throws(place, static_cast<size_t>(breaking.attempt % 4), in_turn)(
            breaking);
      },
      {.steps = 3, .failures = 5});
}

TEST(Failure, OfRanksThatAreFarAheadOrFarBehind) {
  for (const auto place : {Place::kForward, Place::kParameterHook}) {
    expect_failures_leave_no_trace(
        {2, 3},
        kAllStrategies,
        [place](Breaking& breaking) {
          if ((breaking.rank + breaking.attempt / 2) % 2 == 0) {
            std::this_thread::sleep_for(std::chrono::milliseconds(15));
          }
          throws(place, 1, in_turn)(breaking);
        },
        {.steps = 2, .failures = 2});
  }
}

} // namespace
} // namespace fsdp::testing::failure
