#include "launch/launch_error.h"

#include <system_error>

namespace fsdp::detail {

LaunchError system_error(const std::string& what, int error) {
  return LaunchError(what + ": " + std::generic_category().message(error));
}

} // namespace fsdp::detail
