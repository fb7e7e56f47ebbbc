#include "launch/host.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

#include <sys/wait.h>
#include <unistd.h>

namespace fsdp::testing {
namespace {

using detail::host_identity;
using detail::launcher_process;

/// What `make` returns in a child of a child of this process.
std::string in_grandchild(std::string (*make)()) {
  std::array<int, 2> ends{};
  EXPECT_EQ(::pipe(ends.data()), 0);
  const auto child = ::fork();
  if (child == 0) {
    const auto grandchild = ::fork();
    if (grandchild == 0) {
      const auto text = make();
      const auto written = ::write(ends[1], text.data(), text.size());
      ::_exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
    }
    int status = 0;
    ::waitpid(grandchild, &status, 0);
    ::_exit(status == 0 ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  std::array<char, 4096> text{};
  const auto bytes = ::read(ends[0], text.data(), text.size());
  ::close(ends[0]);
  ::close(ends[1]);
  return bytes < 0 ? "" : std::string(text.data(), static_cast<size_t>(bytes));
}

TEST(HostIdentity, IsTheSameInAllProcessesOfAUser) {
  EXPECT_EQ(in_grandchild(host_identity), host_identity());
  EXPECT_NE(
      host_identity().find("|" + std::to_string(::getuid())),
      std::string::npos);
}

std::string launcher_by_unset_variable() {
  return launcher_process("LIBFSDP_TEST_IS_NOT_SET");
}

// PATH is in the environment of this process, and of those above it.
std::string launcher_by_path() {
  return launcher_process("PATH");
}

TEST(LauncherProcess, IsTheParentWhereOnlyTheRankHasTheVariable) {
  const auto launcher = launcher_by_unset_variable();
  EXPECT_EQ(launcher.rfind(std::to_string(::getppid()) + "@", 0), 0u)
      << launcher;
}

TEST(LauncherProcess, IsFoundThroughProcessesInBetween) {
  EXPECT_EQ(in_grandchild(launcher_by_path), launcher_by_path());
  EXPECT_NE(
      in_grandchild(launcher_by_unset_variable), launcher_by_unset_variable());
}

} // namespace
} // namespace fsdp::testing
