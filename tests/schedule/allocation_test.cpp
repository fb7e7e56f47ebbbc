// Counts the allocations of this program.

#include "schedule_run.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<int64_t> allocations{0};

} // namespace

// Not inline: g++ 12 would take the free() here for that of another allocator.

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes)) {
    return memory;
  }
  throw std::bad_alloc();
}

[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}

[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace fsdp::detail {
namespace {

void run_step(Schedule& schedule, const std::vector<Units>& forward) {
  const auto read = [&](const Units& units) {
    schedule.touch(units);
    schedule.unpin(units);
  };
  schedule.begin_pass(PassKind::kForward);
  for (const auto& units : forward) {
    read(units);
  }
  schedule.end_pass();
  schedule.begin_pass(PassKind::kBackward);
  for (size_t i = forward.size(); i-- > 0;) {
    read(forward[i]);
    read(forward[i]);
  }
  schedule.end_pass();
}

TEST(Allocation, StepsThatFollowTheirScheduleAllocateNothing) {
  Schedule schedule(5, 2);
  schedule.set_prefetch(PassKind::kForward, 1, {3, 4});
  const std::vector<Units> forward{
      {0}, {0}, {1, 2}, {2}, {3, 3}, {4}, {0, 1, 2, 3, 4}, {2}};
  run_step(schedule, forward); // records forward
  run_step(schedule, forward); // both are recorded
  const auto before = allocations.load();
  EXPECT_GT(before, 0);
  for (int step = 0; step < 10; ++step) {
    run_step(schedule, forward);
  }
  EXPECT_EQ(allocations.load() - before, 0);
}

} // namespace
} // namespace fsdp::detail
