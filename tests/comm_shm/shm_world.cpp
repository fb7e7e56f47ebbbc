#include "shm_world.h"

namespace fsdp::detail {
namespace {

// This program's run_ranks() and make_ranks() are over shared memory.
const bool is_chosen = [] {
  world_kind() = {[](int size, std::chrono::milliseconds timeout) {
    return make_world_of_shm(size, timeout);
  }};
  return true;
}();

} // namespace

JoinWorld make_world_of_shm(
    int size,
    std::chrono::milliseconds timeout,
    size_t segment_bytes) {
  return [segments = ShmSegment::for_threads(size, segment_bytes),
          timeout](int rank) {
    return make_shm_communicator(segments[static_cast<size_t>(rank)], timeout);
  };
}

} // namespace fsdp::detail
