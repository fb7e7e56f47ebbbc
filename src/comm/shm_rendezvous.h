#pragma once

#include "comm/peer_process.h"
#include "comm/shm_memory.h"
#include "comm/shm_segment.h"

#include <sys/types.h>

#include <string>
#include <vector>

namespace fsdp::detail {

/// Where rank 0 listens for the others: an abstract socket name that holds the
/// user and the job, cut and hashed where it would be too long.
std::string shm_socket_name(uid_t user, const std::string& job);

/// Finds the ranks of this host, by threads or processes that call this at the
/// same address, and gives them memory in common, as large as all of them have
/// address space for. Returns when all have mapped it: their processes by rank.
/// Throws CommunicationError, with the same text on all ranks that rank 0
/// knows.
std::vector<PeerProcess> meet(const ShmAddress& address, ShmMemory& memory);

} // namespace fsdp::detail
