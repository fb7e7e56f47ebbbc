#pragma once

#include <fsdp/export.h>
#include <fsdp/world.h>

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>

namespace c10d {
class Backend;
class Store;
} // namespace c10d

namespace fsdp {

// Worlds over the back ends of c10d, for programs that have a process group, a
// store or a back end of their own. Programs that do not: see fsdp::init().

struct C10dOptions {
  /// The longest wait for a peer.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// Compares every call with those of the other ranks before it runs, by a
  /// small gather. Costs a round trip per call; finds out at once, and by name,
  /// when ranks call different things.
  bool compare_calls = false;
};

/// Makes a back end that connects rank `rank` of `size` to the others, which
/// call it at about the same time with the same part of the store; one that
/// uses the tensors of the host. It may wait for them, and is called by threads
/// of the library, several at once.
using C10dBackendFactory = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size)>;

/// A world over back ends that `factory` makes: one for the world and one for
/// each world that is split from it (a net splits three), and new ones for the
/// step after a failed one. Of a back end _allgather_base, alltoall_base and
/// broadcast are used, on tensors of bytes; sums are made here, in rank order.
/// Its own time limit should be longer than `options.timeout`.
///
/// `store` is the same for all ranks, is used by several threads at once, and
/// serves while the world lives: failures and their reasons are told through
/// it. It may carry several worlds, which all ranks make in the same order.
///
/// A peer that dies is noticed when a call needs it: by the back end's error,
/// or at the time limit. (The worlds of init() notice it at any time.)
///
/// Collective: waits until all ranks have come. Throws c10::DistBackendError,
/// which names those that have not, and c10::ValueError.
FSDP_API World world_over(
    C10dBackendFactory factory,
    c10::intrusive_ptr<c10d::Store> store,
    int rank,
    int size,
    C10dOptions options = {});

/// A world over this one back end, which the program must not use meanwhile.
/// Without a way to make others:
///
/// - a failed step ends the world, on all ranks; there is no next step;
/// - World::split() gives worlds of all ranks in the same order only, which
///   share the back end. Calls of all of them must come in one order on all
///   ranks, so that every call is compared first, as with
///   C10dOptions::compare_calls.
///
/// `store` may be null: then errors can not say which ranks are missing, and a
/// failure reaches the peers at the time limit only.
///
/// Collective. Throws c10::DistBackendError and c10::ValueError.
FSDP_API World world_over(
    c10::intrusive_ptr<c10d::Backend> backend,
    c10::intrusive_ptr<c10d::Store> store,
    C10dOptions options = {});

} // namespace fsdp
