#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fsdp::tool {

/// " Did you mean 'run'?" for the known word that is nearest to `word`, or
/// nothing where none is near.
std::string did_you_mean(
    std::string_view word,
    const std::vector<std::string>& known);

} // namespace fsdp::tool
