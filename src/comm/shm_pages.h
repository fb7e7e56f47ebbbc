#pragma once

#include <cstddef>
#include <string>

namespace fsdp::detail {

/// Takes memory for the pages that hold [offset, offset + bytes) of the file
/// `memory`, which is mapped at `base`; what is there already stays as it is.
/// Takes all or nothing: throws CommunicationError, which says that `owner`
/// wanted it, where the system or a memory cgroup would run out. No other
/// process writes to these pages meanwhile.
void take_pages(
    int memory,
    std::byte* base,
    size_t offset,
    size_t bytes,
    const std::string& owner);

/// Gives whole pages within [offset, offset + bytes) back; they are zeros then.
void release_pages(int memory, size_t offset, size_t bytes);

} // namespace fsdp::detail
