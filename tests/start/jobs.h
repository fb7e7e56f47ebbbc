#pragma once

#include "start/processes.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fsdp::testing {

inline Variables operator+(Variables first, const Variables& second) {
  for (const auto& [name, value] : second) {
    first[name] = value;
  }
  return first;
}

/// RANK and its companions, of ranks that are all on this host.
inline Variables by_hand(int rank, int size) {
  const auto of_rank = std::to_string(rank);
  const auto of_all = std::to_string(size);
  return {
      {"RANK", of_rank},
      {"WORLD_SIZE", of_all},
      {"LOCAL_RANK", of_rank},
      {"LOCAL_WORLD_SIZE", of_all}};
}

inline const Variables kInfo = {{"LIBFSDP_LOG", "info"}};

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Ended as a process that found all well.
inline void expect_ended_well(const Ended& ended) {
  EXPECT_EQ(ended.status, 0) << "stdout:\n"
                             << ended.out << "stderr:\n"
                             << ended.err;
}

inline void expect_has(const std::string& text, const std::string& part) {
  EXPECT_TRUE(has(text, part)) << "'" << part << "' is not in:\n" << text;
}

/// Every rank has trained and found the unsharded losses; rank 0 (whose stderr
/// is in `ended` too) reports all `parts`.
inline void expect_trained(
    const std::vector<Ended>& ended,
    int size,
    const std::vector<std::string>& parts) {
  std::string out;
  std::string err;
  for (const auto& each : ended) {
    expect_ended_well(each);
    out += each.out;
    err += each.err;
  }
  for (int rank = 0; rank < size; ++rank) {
    expect_has(
        out,
        "rank " + std::to_string(rank) + "/" + std::to_string(size) +
            ": losses agree");
  }
  for (const auto& part : parts) {
    expect_has(err, part);
  }
}

/// Ended by itself with an error that has all `parts`.
inline void expect_failed(
    const Ended& ended,
    const std::vector<std::string>& parts) {
  EXPECT_GT(ended.status, 0) << "stdout:\n"
                             << ended.out << "stderr:\n"
                             << ended.err;
  for (const auto& part : parts) {
    expect_has(ended.err, part);
  }
}

} // namespace fsdp::testing
