#include "fsdp/version.h"

#define FSDP_STRINGIFY_(x) #x
#define FSDP_STRINGIFY(x) FSDP_STRINGIFY_(x)

namespace fsdp {

const char* version() noexcept {
  return FSDP_STRINGIFY(FSDP_VERSION_MAJOR) "." FSDP_STRINGIFY(
      FSDP_VERSION_MINOR) "." FSDP_STRINGIFY(FSDP_VERSION_PATCH);
}

} // namespace fsdp

#undef FSDP_STRINGIFY
#undef FSDP_STRINGIFY_
