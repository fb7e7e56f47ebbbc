// What needs a minute to be seen.

#include "comm/c10d_backend.h"
#include "gloo_world.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace fsdp::detail {
namespace {

TEST(GlooWorld, OutlivesTheLimitsOfItsBackEnd) {
  constexpr std::chrono::milliseconds kLimit(500);
  run_ranks(
      2,
      [&](Communicator& comm) {
        comm.barrier("before");
        std::this_thread::sleep_for(
            longer_than(kLimit) + std::chrono::seconds(2));
        comm.barrier("after");
        EXPECT_EQ(comm.aborted(), "");
      },
      kLimit);
}

} // namespace
} // namespace fsdp::detail
