#pragma once

#include "fsdp/export.h"

// The one place that states the version; the build reads it from here.
#define FSDP_VERSION_MAJOR 0
#define FSDP_VERSION_MINOR 1
#define FSDP_VERSION_PATCH 0

namespace fsdp {

/// Returns the version of the library that is linked or loaded, as
/// "MAJOR.MINOR.PATCH". It differs from the `FSDP_VERSION_*` macros when the
/// program was compiled against the headers of another version. The string is
/// static; never throws.
FSDP_API const char* version() noexcept;

} // namespace fsdp
