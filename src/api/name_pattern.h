#pragma once

#include <string>

namespace fsdp::detail {

/// Whether a dotted name matches a pattern, in which `*`, `?` and `[...]` stay
/// inside one part of the name.
bool name_matches(const std::string& pattern, const std::string& name);

} // namespace fsdp::detail
