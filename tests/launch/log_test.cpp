#include "launch/log.h"

#include <gtest/gtest.h>

#include <string>

namespace fsdp::testing {
namespace {

using detail::Log;
using detail::LogLevel;

/// What a rank of two writes to stderr.
std::string written(LogLevel level, int rank) {
  ::testing::internal::CaptureStderr();
  const Log log(level, rank, 2);
  log.info("job");
  log.debug("mine");
  return ::testing::internal::GetCapturedStderr();
}

TEST(Log, IsOffByDefault) {
  ::testing::internal::CaptureStderr();
  Log().info("job");
  Log().debug("mine");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(written(LogLevel::kOff, 0), "");
}

TEST(Log, RankZeroSpeaksForTheJob) {
  EXPECT_EQ(written(LogLevel::kInfo, 0), "fsdp rank 0/2: job\n");
  EXPECT_EQ(written(LogLevel::kInfo, 1), "");
}

TEST(Log, DebugHasALineOfEachRank) {
  EXPECT_EQ(
      written(LogLevel::kDebug, 0),
      "fsdp rank 0/2: job\nfsdp rank 0/2: mine\n");
  EXPECT_EQ(written(LogLevel::kDebug, 1), "fsdp rank 1/2: mine\n");
}

} // namespace
} // namespace fsdp::testing
