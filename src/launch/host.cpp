#include "launch/host.h"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <iterator>
#include <sstream>

namespace fsdp::detail {

namespace {

std::string file_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data()
                                                          : std::string();
}

/// Field `number`, as man 5 proc counts them, of /proc/PID/stat; from 3 on,
/// since the name of the command may hold blanks.
std::string stat_field(const std::string& pid, int number) {
  const auto text = file_text("/proc/" + pid + "/stat");
  const auto end_of_name = text.rfind(')');
  if (end_of_name == std::string::npos) {
    return {};
  }
  std::istringstream fields(text.substr(end_of_name + 1));
  std::string field;
  for (int i = 3; i <= number; ++i) {
    fields >> field;
  }
  return field;
}

bool has_variable(const std::string& pid, const std::string& name) {
  const auto zero = std::string(1, '\0');
  const auto all = zero + file_text("/proc/" + pid + "/environ");
  return all.find(zero + name + "=") != std::string::npos;
}

} // namespace

std::string host_identity() {
  std::ostringstream identity;
  struct stat network = {};
  static_cast<void>(::stat("/proc/self/ns/net", &network));
  auto boot = file_text("/proc/sys/kernel/random/boot_id");
  boot = boot.substr(0, boot.find('\n'));
  identity << host_name() << '|' << boot << '|' << network.st_ino << '|'
           << ::getuid();
  return identity.str();
}

std::string launcher_process(const std::string& variable) {
  constexpr int kParent = 4;
  constexpr int kStartTime = 22;
  auto pid = std::to_string(::getppid());
  while (has_variable(pid, variable)) {
    pid = stat_field(pid, kParent);
  }
  const auto start = stat_field(pid, kStartTime);
  return start.empty() ? std::string() : pid + "@" + start;
}

} // namespace fsdp::detail
