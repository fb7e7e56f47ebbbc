#pragma once

#include <cstddef>

namespace fsdp::detail {

/// How a copy is stored. kStream goes past the caches, which is quicker for
/// data that nobody reads before it would have been evicted anyhow.
enum class Stores : unsigned char { kCached, kStream };

/// Copies like memcpy; a null pointer is fine where `bytes` is 0. Visible to
/// whoever sees a later release store of this thread.
void copy_bytes(
    std::byte* to,
    const std::byte* from,
    size_t bytes,
    Stores stores = Stores::kCached);

/// The same for one block of several, with finish_blocks() after the last.
void copy_block(
    std::byte* to,
    const std::byte* from,
    size_t bytes,
    Stores stores);
void finish_blocks(Stores stores);

/// kStream where a collective in which all ranks together move `bytes` through
/// memory does not fit into the last-level cache.
Stores stores_for(size_t bytes);

} // namespace fsdp::detail
