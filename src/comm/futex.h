#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fsdp::detail {

// Sleeping on a word in memory that processes share. (std::atomic::wait works
// within one process only.)

/// Returns when `word` is not `expected`, after a wake, after `limit`, or for
/// no reason.
void futex_wait(
    std::atomic<uint32_t>& word,
    uint32_t expected,
    std::chrono::milliseconds limit);

/// Wakes all who sleep on `word`.
void futex_wake(std::atomic<uint32_t>& word);

} // namespace fsdp::detail
