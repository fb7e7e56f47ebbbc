#pragma once

#include <cstdint>

namespace bench {

/// Bytes of memory that this process shares with the other ranks, all of it:
/// the pages that were touched, by whichever rank.
int64_t shared_memory_bytes();

} // namespace bench
