#include "comm/shm_rendezvous.h"

#include "comm/shm_leader.h"
#include "comm/shm_member.h"

#include <sys/un.h>

#include <cstdint>
#include <cstdio>

namespace fsdp::detail {
namespace {

constexpr size_t kMostNameBytes = sizeof(sockaddr_un::sun_path) - 1;

// FNV-1a: the same in every build, unlike std::hash.
std::string name_hash(const std::string& text) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  }
  char digits[17];
  std::snprintf(
      digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

} // namespace

std::string shm_socket_name(uid_t user, const std::string& job) {
  std::string name = "fsdp-" + std::to_string(user) + "-" + job;
  if (name.size() <= kMostNameBytes) {
    return name;
  }
  const std::string hash = "-" + name_hash(job);
  return name.substr(0, kMostNameBytes - hash.size()) + hash;
}

std::vector<PeerProcess> meet(const ShmAddress& address, ShmMemory& memory) {
  if (address.rank == 0) {
    return ShmLeader(address, memory).meet();
  }
  return ShmMember(address, memory).meet();
}

} // namespace fsdp::detail
