#include "faults/strike.h"

#include "start/jobs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

namespace fsdp::testing {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::seconds kEndLimit(30);

JobOptions job_of(const Strike& strike) {
  Words arguments = {"train", "steps=1000000"};
  if (!strike.place.empty()) {
    arguments.push_back("victim=" + std::to_string(strike.victim));
    arguments.push_back("signal=" + std::to_string(strike.signal));
    arguments.push_back("place=" + strike.place);
  }
  return {
      .backend = strike.backend,
      .size = strike.size,
      .timeout = strike.timeout,
      .arguments = arguments};
}

int64_t now_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<milliseconds>(now).count();
}

/// Returns when it struck.
int64_t strike_job(const Strike& strike, Job& job, Leavings& leavings) {
  if (strike.place.empty()) {
    strike.moment(job);
    leavings.note(job);
    job.rank(strike.victim).signal(strike.signal);
    return now_ms();
  }
  EXPECT_TRUE(job.await_line(strike.victim, "is at its fate"));
  // The others come as far as they can without this rank.
  std::this_thread::sleep_for(milliseconds(100));
  leavings.note(job);
  job.make_file("strike");
  EXPECT_TRUE(job.await_line(strike.victim, "struck"));
  const auto time = line_after(job.rank(strike.victim).out(), "struck ");
  return time.empty() ? now_ms() : std::stoll(time);
}

bool names(const std::string& text, int rank) {
  const auto number = std::to_string(rank);
  return has(text, "rank " + number) || // "rank 1/3 (pid 4711, dead) died"
      has(text, "not joined: " + number) || has(text, "not come: " + number);
}

/// Whether it tells what had to wait.
bool names_a_wait(const std::string& text) {
  for (const auto* wait :
       {"unit '",
        "settlement",
        "preparation",
        "comparison",
        "write to a shard",
        "start-up",
        "start of the world",
        "store at",
        "hosts of the ranks",
        "name of the job",
        "split",
        "memory for"}) {
    if (has(text, wait)) {
      return true;
    }
  }
  return false;
}

/// Returns when it threw.
int64_t expect_told(const Strike& strike, const Ended& survivor) {
  const auto all =
      "stdout:\n" + survivor.out + "stderr:\n" + survivor.err.substr(0, 2000);
  EXPECT_EQ(survivor.status, kStatusOfFailed) << all;
  const auto failed = line_after(survivor.out, "failed ");
  if (failed.empty()) {
    return 0;
  }
  EXPECT_TRUE(names(failed, strike.victim)) << all;
  EXPECT_TRUE(names_a_wait(failed)) << all;
  if (!strike.where.empty()) {
    EXPECT_TRUE(has(failed, " " + strike.where + ": ")) << all;
  }
  for (const auto& part : strike.parts) {
    EXPECT_TRUE(has(failed, part)) << part << " is not in\n" << all;
  }
  if (!has(failed, " start: ")) {
    const auto again = line_after(survivor.out, "again ");
    EXPECT_TRUE(has(again, "this net can not be used any more")) << all;
    EXPECT_TRUE(names(again, strike.victim)) << all;
  }
  return std::stoll(failed);
}

/// A process of the job may keep its connection to the store; see init.h. Gloo
/// goes on trying to connect to a rank that dies while it does so; what that
/// holds goes with the process, or after some minutes.
void expect_nothing_kept(const Strike& strike, int rank, const Ended& ended) {
  const bool was_connecting = strike.backend == "gloo" &&
      has(line_after(ended.out, "failed "), " start: ");
  if (was_connecting) {
    return;
  }
  if (strike.backend == "shm") {
    EXPECT_EQ(line_after(ended.out, "left "), "0 descriptors, 0 views")
        << ended.out;
  } else if (rank != 0) { // rank 0 serves the store
    EXPECT_LE(std::stoi("0" + line_after(ended.out, "left ")), 1) << ended.out;
  }
}

milliseconds limit_of(const Strike& strike) {
  return strike.signal == SIGKILL && !strike.may_be_missing
      ? kDeathIsSeen
      : strike.timeout + kDeathIsSeen;
}

/// A rank that goes on finds out that the others have given it up.
void expect_told_when_continued(const Strike& strike, Job& job) {
  job.rank(strike.victim).signal(SIGCONT);
  EXPECT_TRUE(job.await_end(strike.victim, limit_of(strike) + kEndLimit));
  const auto ended = job.rank(strike.victim).result();
  EXPECT_EQ(ended.status, kStatusOfFailed)
      << ended.status << "\n"
      << ended.out << ended.err.substr(0, 2000);
}

} // namespace

milliseconds expect_seen(const Strike& strike) {
  SCOPED_TRACE(
      strike.backend + ", rank " + std::to_string(strike.victim) + " of " +
      std::to_string(strike.size) + ", signal " +
      std::to_string(strike.signal) + " " + strike.place);
  Job job(job_of(strike));
  Leavings leavings;
  const int64_t struck = strike_job(strike, job, leavings);
  int64_t last = struck;
  for (int rank = 0; rank < job.size(); ++rank) {
    if (rank != strike.victim) {
      EXPECT_TRUE(job.await_end(rank, limit_of(strike) + kEndLimit));
      const auto ended = job.rank(rank).result();
      last = std::max(last, expect_told(strike, ended));
      expect_nothing_kept(strike, rank, ended);
    }
  }
  const milliseconds took(last - struck);
  EXPECT_LT(took, limit_of(strike));
  if (strike.signal == SIGSTOP) {
    expect_told_when_continued(strike, job);
  }
  EXPECT_TRUE(job.await_end(strike.victim, kEndLimit));
  leavings.expect_none(job);
  return took;
}

} // namespace fsdp::testing
