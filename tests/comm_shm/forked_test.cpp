// A fork of a rank has no part in its world, and must not harm it.

#include "comm/one_thread.h"
#include "shm_world.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <functional>

namespace fsdp::detail {
namespace {

/// What `in_child` returns in a forked child; how the child has ended, if not
/// well.
std::string result_of_fork(const std::function<std::string()>& in_child) {
  std::array<int, 2> ends{};
  EXPECT_EQ(::pipe(ends.data()), 0);
  std::fflush(nullptr); // else the child could write it once more
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL); // without the report of a sanitizer
    ::alarm(30);
    const std::string text = in_child();
    const auto written = ::write(ends[1], text.data(), text.size());
    ::_exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  ::close(ends[1]);
  std::string text;
  std::array<char, 4096> part{};
  for (ssize_t bytes = 0;
       (bytes = ::read(ends[0], part.data(), part.size())) > 0;) {
    text.append(part.data(), static_cast<size_t>(bytes));
  }
  ::close(ends[0]);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status == 0 ? text : "ended with status " + std::to_string(status);
}

class ForkedRank : public testing::Test {
 protected:
  ForkedRank() {
    slices_ = comm_->share_slices(std::vector<int64_t>{100});
    Bytes buffer(1000);
    comm_->all_gather(buffer, "before")->wait();
  }

  /// Runs `call` in a fork, and checks that the rank itself goes on.
  std::string error_in_fork(const std::function<void()>& call) {
    const auto text = result_of_fork([&] { return error_of(call); });
    EXPECT_EQ(barrier_error(*comm_), "no error");
    EXPECT_EQ(comm_->aborted(), "");
    return text;
  }

  void expect_refused(const std::function<void()>& call) {
    const auto text = error_in_fork(call);
    EXPECT_TRUE(contains(
        text,
        "this process is a fork of a rank; only the rank itself can "
        "communicate"))
        << text;
  }

  Comm comm_ = make_ranks(1)[0];
  std::shared_ptr<SharedSlices> slices_;
};

TEST_F(ForkedRank, KnowsThatItIsNone) {
  EXPECT_EQ(result_of_fork([&] { return comm_->aborted(); }).find("this"), 0u);
}

TEST_F(ForkedRank, CanCallNothing) {
  Bytes buffer(8);
  expect_refused([&] { comm_->barrier("b"); });
  expect_refused([&] { comm_->all_gather(buffer, "a")->wait(); });
  expect_refused([&] { start_sum(*comm_, buffer); });
  expect_refused([&] { comm_->split(0, 0); });
  expect_refused([&] { comm_->reserve(100); });
  expect_refused([&] { comm_->share_slices(std::vector<int64_t>{100}); });
}

TEST_F(ForkedRank, CanNotWaitForWhatTheRankHasStarted) {
  const auto comms = make_ranks(2);
  Bytes buffer = bytes_of<int32_t>({1});
  const auto work = start_sum(*comms[0], buffer);
  expect_refused([&] {
    EXPECT_TRUE(work->ready());
    work->wait();
  });
  Bytes other = bytes_of<int32_t>({1});
  start_sum(*comms[1], other)->wait();
  work->wait();
  EXPECT_EQ(buffer, bytes_of<int32_t>({2}));
}

TEST_F(ForkedRank, CanNotWaitForSlices) {
  expect_refused([&] { slices_->await_published("a"); });
  expect_refused([&] { slices_->await_retired("a"); });
}

TEST_F(ForkedRank, TellsNobodyOfWhatItDoes) {
  EXPECT_EQ(
      error_in_fork([&] {
        comm_->signal_failure("a");
        slices_->publish();
        slices_->retire();
      }),
      "no error");
  EXPECT_EQ(comm_->epoch(), 0u);
}

TEST_F(ForkedRank, MayDestroyEverything) {
  auto comms = make_ranks(2);
  Bytes buffer(8);
  auto work = start_sum(*comms[0], buffer);
  EXPECT_EQ(
      result_of_fork([&] {
        work.reset();
        slices_.reset();
        comm_.reset();
        comms.clear();
        return std::string("destroyed");
      }),
      "destroyed");
  Bytes other(8);
  start_sum(*comms[1], other)->wait();
  work->wait();
}

} // namespace
} // namespace fsdp::detail
