#pragma once

#include "layout/flat_layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace fsdp::detail {

/// Seeds of the property tests: one random case each.
inline constexpr uint64_t kCases = 3000;

inline int64_t random_in(std::mt19937_64& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

/// 0 to 6 parameters; many without elements, of few, or of whole alignments.
inline std::vector<int64_t> random_numels(std::mt19937_64& random) {
  std::vector<int64_t> numels(static_cast<size_t>(random_in(random, 0, 6)));
  for (int64_t& numel : numels) {
    switch (random_in(random, 0, 3)) {
      case 0:
        numel = random_in(random, 0, 2);
        break;
      case 1:
        numel = kAlignmentNumel * random_in(random, 0, 4);
        break;
      default:
        numel = random_in(random, 0, 400);
    }
  }
  return numels;
}

/// Expects `call` to throw std::invalid_argument with `text` in its message.
template <typename Call>
void expect_invalid(const Call& call, const std::string& text) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown instead of: " << text;
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
        << error.what();
  }
}

} // namespace fsdp::detail
