#pragma once

#include "comm/c10d_world.h"

#include <fsdp/communicator.h>

#include <memory>

namespace fsdp::detail {

/// The communicator of one rank over back ends that `options.factory` makes:
/// one for every communicator that comes from it by split(), and a new one for
/// each step after a failure. Every factory call gets a store of its own.
///
/// Without a factory, over `options.backend` alone: a split must have all ranks
/// and shares the back end, so that every call is compared with those of the
/// other ranks before it runs; a failed step ends the world.
///
/// Waits until all ranks have come. Throws CommunicationError, which names
/// those that have not.
std::shared_ptr<Communicator> make_c10d_communicator(C10dWorldOptions options);

} // namespace fsdp::detail
