#pragma once

#include <string>

namespace fsdp::detail {

/// The same for two processes where they can share memory: host name, boot,
/// network namespace and user.
std::string host_identity();

/// Names the process that has started the ranks of this host: the nearest
/// ancestor that does not have `variable` in its environment. So it is the same
/// for all ranks of a host, also where scripts lie in between, and another one
/// for another job. Empty where it can not be found.
std::string launcher_process(const std::string& variable);

} // namespace fsdp::detail
