#include "comm/memory_limits.h"
#include "comm/shm_memory.h"
#include "comm/shm_segment.h"

#include "shm_peer_program.h"
#include "thread_world.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

namespace fsdp::detail {
namespace {

constexpr size_t kMebibyte = size_t{1} << 20;
constexpr size_t kPage = 4096;

size_t taken_bytes(const ShmMemory& memory) {
  struct stat status {};
  ::fstat(memory.descriptor().get(), &status);
  return static_cast<size_t>(status.st_blocks) * 512;
}

class ShmReserve : public testing::Test {
 protected:
  ShmReserve() { memory_.create(memory_.capacity()); }

  bool is_filled(size_t offset, size_t bytes, char value) const {
    const auto* data =
        reinterpret_cast<const char*>(memory_.read_only_data()) + offset;
    return std::string(data, bytes) == std::string(bytes, value);
  }

  ShmMemory memory_{"rank 1/4", 64 * kMebibyte};
};

TEST_F(ShmReserve, TakesMemoryForItsPagesOnly) {
  EXPECT_EQ(taken_bytes(memory_), 0u);
  memory_.reserve(3 * kPage + 1, 2 * kPage);
  EXPECT_EQ(taken_bytes(memory_), 3 * kPage);
  memory_.reserve(3 * kPage + 1, 2 * kPage);
  EXPECT_EQ(taken_bytes(memory_), 3 * kPage);
  memory_.reserve(0, memory_.bytes());
  EXPECT_EQ(taken_bytes(memory_), 64 * kMebibyte);
  memory_.reserve(memory_.bytes(), 0);
  EXPECT_TRUE(is_filled(0, memory_.bytes(), '\0'));
}

TEST_F(ShmReserve, KeepsWhatIsThere) {
  std::memset(memory_.data() + 5 * kPage, 7, 2 * kPage);
  memory_.reserve(0, 10 * kPage);
  EXPECT_EQ(taken_bytes(memory_), 10 * kPage);
  EXPECT_TRUE(is_filled(5 * kPage, 2 * kPage, '\7'));
}

TEST_F(ShmReserve, IsUndoneByRelease) {
  std::memset(memory_.data(), 7, 10 * kPage);
  memory_.release(kPage - 1, 3 * kPage); // two pages lie within
  EXPECT_EQ(taken_bytes(memory_), 8 * kPage);
  EXPECT_TRUE(is_filled(0, kPage, '\7'));
  EXPECT_TRUE(is_filled(kPage, 2 * kPage, '\0'));
  EXPECT_TRUE(is_filled(3 * kPage, 7 * kPage, '\7'));
  memory_.release(10, 20);
  EXPECT_TRUE(is_filled(0, kPage, '\7'));
  memory_.reserve(0, 10 * kPage);
  EXPECT_TRUE(is_filled(kPage, 2 * kPage, '\0'));
  EXPECT_TRUE(is_filled(0, kPage, '\7'));
}

TEST_F(ShmReserve, SaysWhenTheRangeIsOutside) {
  EXPECT_EQ(
      error_of([&] { memory_.reserve(kMebibyte, 64 * kMebibyte); }),
      "shared memory: reserve of 64.0 MiB at 1.0 MiB by rank 1/4, but its size "
      "is 64.0 MiB. If a limit on address space (ulimit -v) made it small, "
      "raise that.");
  EXPECT_TRUE(contains(
      error_of([&] { memory_.release(SIZE_MAX, 2); }),
      "release of 2 bytes at 16.0 EiB by rank 1/4, but its size is 64.0 MiB"));
}

TEST(ShmMemory, SaysWhenThereIsNotEnough) {
  const MemoryLimits limits = MemoryLimits::now();
  // More than there is and less than a sanitizer leaves address space for.
  ShmMemory memory("rank 1/4", 4 * limits.available);
  memory.create(memory.capacity());
  if (memory.bytes() <= limits.available) {
    GTEST_SKIP() << "there is more memory than address space";
  }
  const std::string error =
      error_of([&] { memory.reserve(0, memory.bytes()); });
  EXPECT_TRUE(contains(
      error,
      "rank 1/4 wants " + byte_text(memory.bytes()) +
          " more of shared memory, but "))
      << error;
  EXPECT_TRUE(contains(
      error,
      " of " + limits.scope +
          " are available. Run fewer ranks on this host or a smaller model, or "
          "give it more memory."))
      << error;
  EXPECT_EQ(taken_bytes(memory), 0u);
}

TEST(ShmMemory, GivesBackWhatItTookWhenTheRestIsRefused) {
  ShmPeer peer;
  ASSERT_EQ(peer.ask("deny fallocate_from_48_MiB"), "ok");
  EXPECT_EQ(
      peer.ask("reserve_alone 8192 67108864").substr(0, 81),
      "ok 8192 8192 8192 stayed rank 0/1 wants 16.0 MiB more of shared memory "
      "(fallocate");
}

TEST(ShmMemory, IsTakenOnSystemsThatCannotPopulate) {
  ShmPeer peer;
  ASSERT_EQ(peer.ask("deny populate"), "ok");
  EXPECT_EQ(
      peer.ask("reserve_alone 8192 67108864"),
      "ok 8192 67108864 67108864 stayed no failure");
}

TEST(ShmMemory, IsAsSmallAsTheAddressSpaceOfAnyRank) {
  ShmPeer peer;
  ASSERT_EQ(
      peer.ask("limit_addresses " + std::to_string(1024 * kMebibyte)), "ok");
  peer.tell(join_command(1, 2, 20'000, 4096 * kMebibyte));
  const auto segment = ShmSegment::join(
      {shm_test_job(), 0, 2, std::chrono::seconds(20), 4096 * kMebibyte});
  EXPECT_LE(segment->bytes(), 256 * kMebibyte); // half of what there is, twice
  EXPECT_GE(segment->bytes(), 64 * kMebibyte);
  EXPECT_EQ(peer.answer(), "ok " + std::to_string(segment->bytes()));
}

TEST(ShmMemory, SaysWhenThereIsNoAddressSpace) {
  ShmPeer peer;
  ASSERT_EQ(peer.ask("limit_addresses 5000000"), "ok");
  EXPECT_EQ(
      peer.ask(join_command(0, 1)),
      "error shared memory: no room for the 64.0 MiB of rank 0/1. Raise the "
      "limits on address space (ulimit -v) and on the size of files (ulimit "
      "-f).");
}

// The system would kill the process that makes a larger file.
TEST(ShmMemory, StaysWithinTheLimitOnFiles) {
  ShmPeer peer;
  ASSERT_EQ(peer.ask("limit_files 10000000"), "ok");
  EXPECT_EQ(peer.ask(join_command(0, 1)), "ok 8388608");
  ASSERT_EQ(peer.ask("limit_files 1000000"), "ok");
  EXPECT_TRUE(contains(peer.ask(join_command(0, 1)), "no room for the 64.0"));
}

// A tree of the files that MemoryLimits reads, below a folder of its own.
class MemoryLimitsFiles : public testing::Test {
 protected:
  MemoryLimitsFiles() {
    put_file("proc/meminfo", "MemTotal: 4096 kB\nMemAvailable: 3072 kB\n");
  }
  ~MemoryLimitsFiles() override { std::filesystem::remove_all(root_); }

  void put_file(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name) << text;
  }

  void put_group(const std::string& name, int limit, int usage) const {
    const std::string folder = "sys/fs/cgroup" + name;
    put_file(folder + "/memory.max", std::to_string(limit));
    put_file(folder + "/memory.current", std::to_string(usage));
  }

  std::string limits() const {
    return MemoryLimits::now(root_.string()).text();
  }

 private:
  const std::filesystem::path root_ =
      std::filesystem::temp_directory_path() / shm_test_job();
};

TEST_F(MemoryLimitsFiles, AreThoseOfTheHostWithoutGroups) {
  EXPECT_EQ(limits(), "3.0 MiB of the 4.0 MiB of this host");
  put_file("proc/self/cgroup", "0::/\n1:name=systemd:/a\nnonsense\n");
  EXPECT_EQ(limits(), "3.0 MiB of the 4.0 MiB of this host");
}

TEST_F(MemoryLimitsFiles, AreTheLeastOfAllGroupsAbove) {
  put_file("proc/self/cgroup", "0::/job/step\n");
  put_group("/job/step", 2000 * 1024, 0);
  put_group("/job", 3000 * 1024, 1500 * 1024);
  EXPECT_EQ(
      limits(), "1.5 MiB of the 2.9 MiB that memory cgroup '/job' allows");
  put_file("sys/fs/cgroup/job/memory.max", "max\n");
  EXPECT_EQ(
      limits(), "2.0 MiB of the 2.0 MiB that memory cgroup '/job/step' allows");
  put_group("/job/step", 10240, 20480);
  EXPECT_EQ(
      limits(),
      "0 bytes of the 10.0 KiB that memory cgroup '/job/step' allows");
}

TEST_F(MemoryLimitsFiles, DoNotCountCachedFilesAsUsed) {
  put_file("proc/self/cgroup", "0::/job\n");
  put_group("/job", 2048 * 1024, 2048 * 1024);
  put_file(
      "sys/fs/cgroup/job/memory.stat",
      "anon 5\ninactive_file 524288\nactive_file 524288\nshmem 99\n");
  EXPECT_EQ(
      limits(), "1.0 MiB of the 2.0 MiB that memory cgroup '/job' allows");
}

// A container whose group is the root of what it sees.
TEST_F(MemoryLimitsFiles, AreFoundAtTheRootOfAContainer) {
  put_file("proc/self/cgroup", "3:cpu,memory:/docker/4711\n0::/\n");
  put_file("sys/fs/cgroup/memory/memory.limit_in_bytes", "2097152");
  put_file("sys/fs/cgroup/memory/memory.usage_in_bytes", "1572864");
  put_file(
      "sys/fs/cgroup/memory/memory.stat",
      "inactive_file 1\ntotal_inactive_file 524288\ntotal_active_file 0\n");
  EXPECT_EQ(limits(), "1.0 MiB of the 2.0 MiB that memory cgroup '/' allows");
}

TEST(MemoryLimits, OfThisHostAreKnown) {
  const MemoryLimits limits = MemoryLimits::now();
  EXPECT_GT(limits.available, uint64_t{1} << 20);
  EXPECT_LT(limits.available, uint64_t{1} << 50);
  EXPECT_EQ(MemoryLimits().text(), "an unknown amount");
}

TEST(ByteText, IsReadable) {
  EXPECT_EQ(byte_text(0), "0 bytes");
  EXPECT_EQ(byte_text(1), "1 byte");
  EXPECT_EQ(byte_text(1023), "1023 bytes");
  EXPECT_EQ(byte_text(1024), "1.0 KiB");
  EXPECT_EQ(byte_text(1536 * kMebibyte), "1.5 GiB");
  EXPECT_EQ(byte_text(UINT64_MAX), "16.0 EiB");
}

} // namespace
} // namespace fsdp::detail
