// Makes the tests of this program as thorough as with threads.

#include "comm/thread_world.h"

#include <gtest/gtest.h>

namespace fsdp::detail {
namespace {

class LongRun : public testing::Environment {
 public:
  void SetUp() override { world_kind().slowness = 1; }
};

const auto* const kLongRun =
    testing::AddGlobalTestEnvironment(new LongRun); // owned by GoogleTest

} // namespace
} // namespace fsdp::detail
