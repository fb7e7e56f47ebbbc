#include "schedule/recorded_passes.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fsdp::detail {
namespace {

void touch_all(RecordedPasses& passes, const std::string& units) {
  for (const char unit : units) {
    passes.touch({static_cast<uint32_t>(unit - 'a'), false});
  }
}

void run_pass(RecordedPasses& passes, const std::string& units) {
  passes.begin();
  touch_all(passes, units);
  passes.end();
}

std::string letters(std::span<const UnitTouch> touches) {
  std::string text;
  for (const auto touch : touches) {
    text += static_cast<char>('a' + touch.unit);
  }
  return text;
}

// What is expected after the touches of a pass; "?" when it is not in step.
std::string expected_after(RecordedPasses& passes, const std::string& units) {
  passes.begin();
  touch_all(passes, units);
  return passes.in_step() ? letters(passes.ahead()) : "?";
}

TEST(RecordedPasses, BeginsEmpty) {
  RecordedPasses passes(3);
  EXPECT_TRUE(passes.empty());
  EXPECT_TRUE(passes.latest().empty());
  EXPECT_EQ(expected_after(passes, ""), "?");
  EXPECT_EQ(expected_after(passes, "ab"), "?");
}

TEST(RecordedPasses, ExpectsTheRestOfTheRecordedPass) {
  RecordedPasses passes(4);
  run_pass(passes, "abcb");
  EXPECT_EQ(letters(passes.latest()), "abcb");
  EXPECT_EQ(expected_after(passes, "a"), "bcb");
  EXPECT_EQ(expected_after(passes, "abc"), "b");
  EXPECT_EQ(expected_after(passes, "abcb"), "");
  EXPECT_EQ(expected_after(passes, "abcba"), "?");
}

TEST(RecordedPasses, NothingIsExpectedBeforeTheFirstTouch) {
  RecordedPasses passes(2);
  run_pass(passes, "ab");
  EXPECT_EQ(expected_after(passes, ""), "?");
}

TEST(RecordedPasses, FindsBackAfterADeparture) {
  RecordedPasses passes(6);
  run_pass(passes, "abcde");
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"af", "?"}, // inserted
      {"afb", "cde"},
      {"affb", "cde"},
      {"ac", "?"}, // b left out
      {"acd", "e"},
      {"acb", "?"}, // two exchanged
      {"acbd", "?"},
      {"acbde", ""},
      {"aba", "?"}, // repeated
      {"abab", "cde"},
      {"c", "?"}, // begun elsewhere
      {"cd", "e"},
      {"fa", "bcde"},
      {"ae", "?"},
      {"aea", "?"}, // beyond the end it goes on at the beginning
      {"aeab", "cde"},
      {"abcdea", "?"},
      {"abcdeab", "cde"}};
  for (const auto& [units, expected] : cases) {
    EXPECT_EQ(expected_after(passes, units), expected) << "after " << units;
  }
}

TEST(RecordedPasses, FindsTheNextOfSeveralTouches) {
  RecordedPasses passes(5);
  run_pass(passes, "abacade");
  EXPECT_EQ(expected_after(passes, "abc"), "?");
  EXPECT_EQ(expected_after(passes, "abca"), "de");
  EXPECT_EQ(expected_after(passes, "dab"), "acade") << "from the beginning";
  RecordedPasses other(5);
  run_pass(other, "abcadae");
  EXPECT_EQ(expected_after(other, "abad"), "ae") << "behind the second a";
}

TEST(RecordedPasses, FollowsTheMostRecentOfThoseThatAgree) {
  RecordedPasses passes(6);
  run_pass(passes, "abc");
  run_pass(passes, "abd");
  EXPECT_EQ(expected_after(passes, "ab"), "d");
  EXPECT_EQ(expected_after(passes, "abc"), "");
  run_pass(passes, "abc");
  EXPECT_EQ(expected_after(passes, "ab"), "c");
  EXPECT_EQ(letters(passes.latest()), "abc");
}

TEST(RecordedPasses, RepeatedPassesTakeOnePlace) {
  RecordedPasses passes(20);
  run_pass(passes, "abc");
  for (int i = 0; i < 50; ++i) {
    run_pass(passes, i % 2 == 0 ? "def" : "deg");
  }
  EXPECT_EQ(expected_after(passes, "a"), "bc");
}

TEST(RecordedPasses, ForgetsTheLeastRecentlyRun) {
  RecordedPasses passes(26);
  const auto pass = [](size_t i) {
    return std::string{static_cast<char>('a' + i), 'z'};
  };
  for (size_t i = 0; i < RecordedPasses::kRemembered; ++i) {
    run_pass(passes, pass(i));
  }
  run_pass(passes, pass(0)); // now the second is the oldest
  run_pass(passes, "yz");
  EXPECT_EQ(expected_after(passes, "a"), "z");
  EXPECT_EQ(expected_after(passes, "b"), "?");
  for (size_t i = 2; i < RecordedPasses::kRemembered; ++i) {
    EXPECT_EQ(expected_after(passes, pass(i).substr(0, 1)), "z");
  }
}

TEST(RecordedPasses, BeginningOfAPassIsAPassOfItsOwn) {
  RecordedPasses passes(4);
  run_pass(passes, "abcd");
  run_pass(passes, "ab");
  EXPECT_EQ(expected_after(passes, "a"), "b");
  EXPECT_EQ(expected_after(passes, "ab"), "");
  EXPECT_EQ(expected_after(passes, "abc"), "d");
}

TEST(RecordedPasses, EmptyPassIsNotRecorded) {
  RecordedPasses passes(2);
  run_pass(passes, "");
  EXPECT_TRUE(passes.empty());
  run_pass(passes, "ab");
  run_pass(passes, "");
  EXPECT_EQ(letters(passes.latest()), "ab");
}

TEST(RecordedPasses, BeginForgetsAPassThatDidNotEnd) {
  RecordedPasses passes(3);
  passes.begin();
  touch_all(passes, "ab");
  run_pass(passes, "bc");
  EXPECT_EQ(letters(passes.latest()), "bc");
}

TEST(RecordedPasses, ClearForgetsAll) {
  RecordedPasses passes(3);
  run_pass(passes, "abc");
  passes.begin();
  touch_all(passes, "a");
  passes.clear();
  EXPECT_TRUE(passes.empty());
  EXPECT_FALSE(passes.in_step());
  passes.end(); // nothing was touched since
  EXPECT_TRUE(passes.empty());
}

TEST(RecordedPasses, GuessIsFollowedUntilAPassIsRecorded) {
  RecordedPasses forward(3);
  run_pass(forward, "abc");
  RecordedPasses backward(3);
  backward.guess_reverse_of(forward.latest());
  EXPECT_TRUE(backward.latest().empty());
  EXPECT_EQ(expected_after(backward, "c"), "ba");
  EXPECT_EQ(expected_after(backward, "b"), "?");
  run_pass(backward, "bca");
  EXPECT_EQ(expected_after(backward, "b"), "ca");
  EXPECT_EQ(expected_after(backward, "c"), "?") << "the guess is forgotten";
  backward.guess_reverse_of(forward.latest());
  EXPECT_EQ(letters(backward.latest()), "bca") << "there is a recorded one";
}

TEST(RecordedPasses, GuessThatCameTrueStays) {
  RecordedPasses forward(3);
  run_pass(forward, "abc");
  RecordedPasses backward(3);
  backward.guess_reverse_of(forward.latest());
  run_pass(backward, "cba");
  run_pass(backward, "bca");
  EXPECT_EQ(expected_after(backward, "c"), "ba");
}

TEST(RecordedPasses, LaterGuessReplacesAnEarlierOne) {
  RecordedPasses forward(4);
  RecordedPasses backward(4);
  backward.guess_reverse_of(forward.latest()); // nothing to guess from
  EXPECT_TRUE(backward.empty());
  run_pass(forward, "abc");
  backward.guess_reverse_of(forward.latest());
  run_pass(backward, "");
  run_pass(forward, "cd");
  backward.guess_reverse_of(forward.latest());
  EXPECT_EQ(expected_after(backward, "d"), "c");
  EXPECT_EQ(expected_after(backward, "c"), "?");
}

TEST(RecordedPasses, TellsWhichTouchesOneOperatorMakes) {
  RecordedPasses passes(3);
  for (const bool joined : {true, false}) { // the last pass counts
    passes.begin();
    passes.touch({0, false});
    passes.touch({1, joined});
    passes.end();
    ASSERT_EQ(passes.latest().size(), 2U);
    EXPECT_EQ(passes.latest()[1], (UnitTouch{1, joined}));
  }
}

TEST(RecordedPasses, BeginningOfALongPassIsRecorded) {
  constexpr size_t kTouches = RecordedPasses::kLongest + 7;
  RecordedPasses passes(3);
  for (int pass = 0; pass < 2; ++pass) {
    passes.begin();
    for (size_t i = 0; i < kTouches; ++i) {
      passes.touch({static_cast<uint32_t>(i % 3), false});
    }
    passes.end();
    EXPECT_EQ(passes.latest().size(), RecordedPasses::kLongest);
  }
  passes.begin();
  size_t unexpected = 0;
  for (size_t i = 0; i < kTouches; ++i) {
    passes.touch({static_cast<uint32_t>(i % 3), false});
    unexpected += passes.in_step() ? 0 : 1;
  }
  EXPECT_EQ(unexpected, 1U) << "only where it starts from the beginning";
}

} // namespace
} // namespace fsdp::detail
