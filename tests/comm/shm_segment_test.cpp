#include "comm/shm_segment.h"

#include "shm_peer_program.h"
#include "thread_world.h"

#include <gtest/gtest.h>

#include <cctype>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace fsdp::detail {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

ShmAddress thread_address(int rank, int size) {
  return {shm_test_job(), rank, size, std::chrono::seconds(20), 64 * kMiB};
}

std::vector<std::shared_ptr<ShmSegment>> join_threads(int size) {
  std::vector<std::shared_ptr<ShmSegment>> segments(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&segments, rank, size] {
      segments[static_cast<size_t>(rank)] =
          ShmSegment::join(thread_address(rank, size));
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return segments;
}

void put(ShmSegment& segment, size_t offset, const std::string& text) {
  std::memcpy(segment.data() + offset, text.c_str(), text.size() + 1);
}

std::string text_at(const ShmSegment& segment, size_t offset) {
  return reinterpret_cast<const char*>(segment.read_only_data() + offset);
}

// What the process `pid` has of shared memory and of handles of processes.
std::string shared_things_of(pid_t pid) {
  const std::string process = "/proc/" + std::to_string(pid);
  std::string result;
  std::ifstream maps(process + "/maps");
  std::string line;
  while (std::getline(maps, line)) {
    if (contains(line, "memfd:fsdp")) {
      result += line + "\n";
    }
  }
  for (const auto& entry :
       std::filesystem::directory_iterator(process + "/fd")) {
    std::error_code error;
    const auto target =
        std::filesystem::read_symlink(entry.path(), error).string();
    if (contains(target, "memfd:fsdp") || contains(target, "pidfd")) {
      result += target + "\n";
    }
  }
  return result;
}

bool is_job_in_use() {
  std::ifstream sockets("/proc/net/unix");
  std::string line;
  while (std::getline(sockets, line)) {
    if (contains(line, shm_test_job())) {
      return true;
    }
  }
  return false;
}

// The inode of the memory, under which all processes that have it show it.
std::string inode_of(const ShmSegment& segment) {
  char start[32];
  std::snprintf(
      start,
      sizeof start,
      "%lx-",
      reinterpret_cast<unsigned long>(segment.read_only_data()));
  std::ifstream maps("/proc/self/maps");
  std::string range;
  std::string mode;
  std::string offset;
  std::string device;
  std::string inode;
  std::string rest;
  while (maps >> range >> mode >> offset >> device >> inode &&
         std::getline(maps, rest)) {
    if (range.rfind(start, 0) == 0) {
      return inode;
    }
  }
  return "no mapping at " + std::string(start);
}

int count_mappings_of(const std::string& inode) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    if (std::isdigit(entry.path().filename().string()[0]) == 0) {
      continue; // not a process, or "self"
    }
    std::ifstream maps(entry.path() / "maps");
    std::string line;
    while (std::getline(maps, line)) {
      count +=
          contains(line, " " + inode + " ") && contains(line, "memfd:fsdp");
    }
  }
  return count;
}

TEST(ShmSegment, ThreadsThatJoinSeeWhatTheOthersWrite) {
  const auto segments = join_threads(20); // more than fit into one message
  for (const auto& segment : segments) {
    put(*segment,
        static_cast<size_t>(segment->rank()) * 100,
        "rank " + std::to_string(segment->rank()));
  }
  for (const auto& segment : segments) {
    EXPECT_EQ(segment->size(), 20);
    EXPECT_EQ(segment->bytes(), 64 * kMiB);
    EXPECT_EQ(text_at(*segment, 0), "rank 0");
    EXPECT_EQ(text_at(*segment, 1900), "rank 19");
    EXPECT_EQ(text_at(*segment, 32 * kMiB), "");
    EXPECT_FALSE(segment->is_dead(0));
    EXPECT_EQ(segment->describe(7), "pid " + std::to_string(::getpid()));
  }
  EXPECT_NE(segments[0]->data(), segments[1]->data());
}

TEST(ShmSegment, ProcessesSeeWhatTheOthersWrite) {
  ShmPeer one;
  ShmPeer two;
  one.tell(join_command(1, 3));
  two.tell(join_command(2, 3));
  const auto segment = ShmSegment::join(thread_address(0, 3));
  EXPECT_EQ(one.answer(), "ok 67108864");
  EXPECT_EQ(two.answer(), "ok 67108864");
  put(*segment, 0, "from_rank_0");
  EXPECT_EQ(one.ask("write 5000 from_rank_1"), "ok");
  EXPECT_EQ(one.ask("read 0"), "ok from_rank_0");
  EXPECT_EQ(two.ask("read 5000"), "ok from_rank_1");
  EXPECT_EQ(text_at(*segment, 5000), "from_rank_1");
  EXPECT_EQ(segment->describe(1), "pid " + std::to_string(one.pid()));
  EXPECT_EQ(two.ask("describe 0"), "ok pid " + std::to_string(::getpid()));
  EXPECT_EQ(two.ask("describe 1"), "ok pid " + std::to_string(one.pid()));
}

TEST(ShmSegment, OfOneRankNeedsNobody) {
  const auto segment = ShmSegment::join(thread_address(0, 1));
  put(*segment, 0, "alone");
  EXPECT_EQ(text_at(*segment, 0), "alone");
  EXPECT_FALSE(is_job_in_use());
}

TEST(ShmSegment, OfRanksAsThreadsIsOneMemory) {
  auto segments = ShmSegment::for_threads(3, 1024 * kMiB);
  put(*segments[1], 1000 * kMiB, "from_rank_1");
  EXPECT_EQ(text_at(*segments[2], 1000 * kMiB), "from_rank_1");
  EXPECT_EQ(segments[2]->rank(), 2);
  EXPECT_EQ(segments[2]->size(), 3);
  EXPECT_EQ(segments[0]->bytes(), 1024 * kMiB);
  EXPECT_FALSE(segments[0]->is_dead(1));
  EXPECT_EQ(
      segments[0]->describe(1), "thread of pid " + std::to_string(::getpid()));
  segments.erase(segments.begin());
  EXPECT_EQ(text_at(*segments[0], 1000 * kMiB), "from_rank_1");
}

TEST(ShmSegment, FaultsWhenItsReadOnlyViewIsWritten) {
  ShmPeer process;
  ASSERT_EQ(process.ask(join_command(0, 1)), "ok 67108864");
  EXPECT_EQ(process.ask("write_read_only"), "nothing");
  EXPECT_EQ(WTERMSIG(process.wait()), SIGSEGV);
  ShmPeer threads;
  ASSERT_EQ(threads.ask("threads 2 67108864"), "ok");
  EXPECT_EQ(threads.ask("write_read_only"), "nothing");
  EXPECT_EQ(WTERMSIG(threads.wait()), SIGSEGV);
}

TEST(ShmSegment, StaysWhenOthersLeave) {
  auto segments = join_threads(3);
  put(*segments[0], 0, "from_rank_0");
  segments[0].reset();
  segments[2].reset();
  EXPECT_EQ(text_at(*segments[1], 0), "from_rank_0");
}

TEST(ShmSegment, LeavesNothingInItsProcess) {
  { const auto segments = join_threads(3); }
  { const auto segments = ShmSegment::for_threads(3, kMiB); }
  EXPECT_EQ(shared_things_of(::getpid()), "");
  EXPECT_FALSE(is_job_in_use());
}

TEST(ShmSegment, LeavesNothingWhenAllRanksAreKilled) {
  ShmPeer one;
  ShmPeer two;
  one.tell(join_command(1, 3));
  two.tell(join_command(2, 3));
  auto segment = ShmSegment::join(thread_address(0, 3));
  ASSERT_EQ(one.answer(), "ok 67108864");
  ASSERT_EQ(two.answer(), "ok 67108864");
  const std::string inode = inode_of(*segment);
  EXPECT_EQ(count_mappings_of(inode), 6);
  segment.reset();
  for (ShmPeer* peer : {&one, &two}) {
    peer->kill(SIGKILL);
    EXPECT_EQ(WTERMSIG(peer->wait()), SIGKILL);
  }
  EXPECT_EQ(count_mappings_of(inode), 0);
  EXPECT_FALSE(is_job_in_use());
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    EXPECT_FALSE(contains(entry.path().filename().string(), shm_test_job()));
  }
}

TEST(ShmSegment, TellsThatAPeerIsStoppedOrDead) {
  ShmPeer peer;
  peer.tell(join_command(1, 2));
  const auto segment = ShmSegment::join(thread_address(0, 2));
  ASSERT_EQ(peer.answer(), "ok 67108864");
  const std::string pid = "pid " + std::to_string(peer.pid());
  const auto await_description = [&](const std::string& expected) {
    for (int i = 0; i < 10'000 && segment->describe(1) != expected; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(segment->describe(1), expected);
  };
  EXPECT_EQ(segment->describe(1), pid);
  peer.kill(SIGSTOP);
  await_description(pid + ", stopped");
  EXPECT_FALSE(segment->is_dead(1));
  peer.kill(SIGCONT);
  await_description(pid);
  peer.kill(SIGKILL);
  await_description(pid + ", dead"); // nobody has waited for it yet
  EXPECT_TRUE(segment->is_dead(1));
  EXPECT_FALSE(segment->is_dead(0));
  peer.wait();
  EXPECT_EQ(segment->describe(1), pid + ", dead");
}

TEST(ShmSegment, IsKeptBackFromAForkedChild) {
  ShmPeer peer;
  peer.tell(join_command(1, 2));
  const auto segment = ShmSegment::join(thread_address(0, 2));
  ASSERT_EQ(peer.answer(), "ok 67108864");
  EXPECT_EQ(peer.ask("forked"), "ok no");
  EXPECT_NE(shared_things_of(peer.pid()), "");

  const std::string answer = peer.ask("fork");
  ASSERT_TRUE(contains(answer, "ok "));
  const pid_t child = std::stoi(answer.substr(3));
  EXPECT_EQ(peer.ask("forked"), "ok yes"); // the child answers from now on
  EXPECT_EQ(shared_things_of(child), "");
  EXPECT_EQ(peer.ask("is_dead 0"), "ok no");
  EXPECT_EQ(
      peer.ask("reserve 0 4096"),
      "error shared memory: reserve by a fork of rank 1/2, which has no part "
      "in it.");
  peer.kill(SIGKILL); // the parent
  EXPECT_EQ(WTERMSIG(peer.wait()), SIGKILL);
  EXPECT_TRUE(segment->is_dead(1));
  ASSERT_EQ(peer.ask("occupy"), "ok");
  EXPECT_EQ(peer.ask("leave"), "ok");
  EXPECT_EQ(peer.ask("write_own_page"), "ok");
  EXPECT_EQ(peer.ask(join_command(0, 1)), "ok 67108864"); // one of its own
  EXPECT_EQ(peer.ask("forked"), "ok no");
  ::kill(child, SIGKILL);
}

TEST(ShmSegment, RefusesRanksThatCannotBe) {
  EXPECT_EQ(
      error_of<std::invalid_argument>(
          [] { ShmSegment::join(thread_address(3, 3)); }),
      "shared memory: rank 3 is not one of 3 ranks");
  EXPECT_EQ(
      error_of<std::invalid_argument>([] { ShmSegment::join(ShmAddress{}); }),
      "shared memory: the job has no name");
  EXPECT_EQ(
      error_of<std::invalid_argument>([] { ShmSegment::for_threads(0, 1); }),
      "shared memory: expected at least 1 rank, but got 0");
}

} // namespace
} // namespace fsdp::detail
