#include "comm/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace fsdp::detail {

static_assert(
    sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) &&
    std::atomic<uint32_t>::is_always_lock_free);

void futex_wait(
    std::atomic<uint32_t>& word,
    uint32_t expected,
    std::chrono::milliseconds limit) {
  timespec time{};
  time.tv_sec = limit.count() / 1000;
  time.tv_nsec = limit.count() % 1000 * 1000000;
  // Not FUTEX_PRIVATE_FLAG: other processes wake us.
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &time, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

} // namespace fsdp::detail
