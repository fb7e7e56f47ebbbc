#pragma once

#include <fsdp/communicator.h>

#include <memory>

namespace fsdp::detail {

/// The communicator of a world of one rank: every collective is complete at
/// once.
std::shared_ptr<Communicator> make_single_communicator();

} // namespace fsdp::detail
