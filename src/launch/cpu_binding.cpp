#include "launch/cpu_binding.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <fstream>
#include <map>
#include <thread>
#include <tuple>

namespace fsdp::detail {
namespace {

// More than any kernel is built for (8192).
constexpr int kMostCpus = 16384;
constexpr size_t kSetBytes = CPU_ALLOC_SIZE(kMostCpus);

struct CpuSet {
  alignas(cpu_set_t) unsigned char bytes[kSetBytes] = {};

  cpu_set_t* get() { return reinterpret_cast<cpu_set_t*>(bytes); }
};

int read_number(const std::string& path, int otherwise) {
  std::ifstream file(path);
  int value = 0;
  return file >> value ? std::max(value, 0) : otherwise;
}

std::vector<int> ids_of(std::vector<Cpu>::const_iterator first, size_t count) {
  std::vector<int> ids;
  for (size_t i = 0; i < count; ++i) {
    ids.push_back((first + static_cast<std::ptrdiff_t>(i))->id);
  }
  return ids;
}

// Shares are contiguous in the order of sockets and cores, so that a core is
// not divided where it need not be. Ranks may outnumber the processors.
std::vector<std::vector<int>> core_shares(
    const std::vector<Cpu>& cpus,
    size_t ranks) {
  std::vector<std::vector<int>> result;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const size_t first = rank * cpus.size() / ranks;
    const size_t last = (rank + 1) * cpus.size() / ranks;
    result.push_back(ids_of(
        cpus.begin() + static_cast<std::ptrdiff_t>(first),
        std::max<size_t>(last - first, 1)));
  }
  return result;
}

std::vector<std::vector<int>> socket_shares(
    const std::map<int, std::vector<int>>& sockets,
    size_t ranks) {
  std::vector<std::vector<int>> result;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const size_t index = rank * sockets.size() / ranks;
    result.push_back(
        std::next(sockets.begin(), static_cast<std::ptrdiff_t>(index))->second);
  }
  return result;
}

} // namespace

std::vector<Cpu> allowed_cpus(const std::string& sysfs) {
  std::vector<Cpu> result;
  CpuSet set;
  const bool known = ::sched_getaffinity(0, kSetBytes, set.get()) == 0;
  const int count = static_cast<int>(std::thread::hardware_concurrency());
  for (int id = 0; id < kMostCpus; ++id) {
    if (known ? CPU_ISSET_S(id, kSetBytes, set.get()) : id < count) {
      const std::string topology =
          sysfs + "/cpu" + std::to_string(id) + "/topology/";
      result.push_back(
          {id,
           read_number(topology + "physical_package_id", 0),
           read_number(topology + "core_id", id)});
    }
  }
  return result;
}

std::vector<std::vector<int>>
bind_ranks(Binding binding, std::vector<Cpu> cpus, int ranks) {
  const auto count = static_cast<size_t>(ranks);
  std::map<int, std::vector<int>> sockets;
  for (const Cpu& cpu : cpus) {
    sockets[cpu.socket].push_back(cpu.id);
  }
  if (binding == Binding::kAuto) {
    const bool even = sockets.size() > 1 && count % sockets.size() == 0;
    binding = even ? Binding::kSocket : Binding::kNone;
  }
  if (binding == Binding::kNone || cpus.empty()) {
    return std::vector<std::vector<int>>(count);
  }
  if (binding == Binding::kSocket) {
    return socket_shares(sockets, count);
  }
  std::sort(cpus.begin(), cpus.end(), [](const Cpu& a, const Cpu& b) {
    return std::tie(a.socket, a.core, a.id) < std::tie(b.socket, b.core, b.id);
  });
  return core_shares(cpus, count);
}

int set_affinity(const std::vector<int>& cpus) {
  CpuSet set;
  for (const int id : cpus) {
    CPU_SET_S(static_cast<size_t>(id), kSetBytes, set.get());
  }
  return ::sched_setaffinity(0, kSetBytes, set.get()) == 0 ? 0 : errno;
}

} // namespace fsdp::detail
