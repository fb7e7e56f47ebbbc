#pragma once

#include <string>
#include <vector>

namespace fsdp::detail {

/// Which processors a rank may use.
enum class Binding {
  kAuto,   // sockets where the ranks divide evenly over several, else none
  kNone,   // all that this process may use
  kCore,   // its own share
  kSocket, // those of one socket
};

/// A logical processor.
struct Cpu {
  int id = 0;
  int socket = 0;
  int core = 0; // within the socket; hardware threads share one
};

/// The processors that this process may use.
std::vector<Cpu> allowed_cpus(
    const std::string& sysfs = "/sys/devices/system/cpu");

/// The ids of the processors of each rank; an empty list is "not bound".
std::vector<std::vector<int>>
bind_ranks(Binding binding, std::vector<Cpu> cpus, int ranks);

/// Lets this process run on these processors only; the error of the system
/// call, or 0. Allocates nothing, for use between fork and exec.
int set_affinity(const std::vector<int>& cpus);

} // namespace fsdp::detail
