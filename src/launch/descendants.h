#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>

namespace fsdp::detail {

/// Makes this process the parent of all processes below it whose own parent has
/// ended, as init is otherwise.
void adopt_orphans();

/// Forgets the children that have ended, but those that `is_known` keeps.
void reap_orphans(const std::function<bool(pid_t)>& is_known);

/// Kills all children, and those that become children by that, but `except`.
/// Waits until they are gone, `limit` at most.
void kill_children(pid_t except, std::chrono::milliseconds limit);

} // namespace fsdp::detail
