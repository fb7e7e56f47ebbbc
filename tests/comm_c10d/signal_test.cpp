#include "gloo_world.h"

#include <gtest/gtest.h>

#include <signal.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>

namespace fsdp::detail {
namespace {

/// The names of the threads of this process that take SIGPIPE.
std::multiset<std::string> threads_with_sigpipe() {
  std::multiset<std::string> names;
  for (const auto& task :
       std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(task.path() / "status");
    std::string name;
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("Name:")) {
        name = line.substr(line.find_last_of('\t') + 1);
      }
      if (line.starts_with("SigBlk:")) {
        const auto blocked = std::stoull(line.substr(8), nullptr, 16);
        if ((blocked >> (SIGPIPE - 1) & 1) == 0) {
          names.insert(name);
        }
      }
    }
  }
  return names;
}

// A peer that dies while it is written to would end this process as well.
TEST(GlooSignals, NoThreadOfGlooTakesSigpipe) {
  const auto before = threads_with_sigpipe();
  const auto comms = join_all(make_world_of_gloo(2, kGlooLimit), 2);
  EXPECT_EQ(threads_with_sigpipe(), before);
}

TEST(GlooSignals, TheProgramsOwnMaskStays) {
  const auto mask = [] {
    sigset_t set;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &set);
    return ::sigismember(&set, SIGPIPE);
  };
  EXPECT_EQ(mask(), 0);
  const auto store_error = error_of(
      [] { make_world_of_gloo(2, std::chrono::milliseconds(100))(0); });
  EXPECT_TRUE(contains(store_error, "not arrived: rank 1")) << store_error;
  EXPECT_EQ(mask(), 0);
}

} // namespace
} // namespace fsdp::detail
