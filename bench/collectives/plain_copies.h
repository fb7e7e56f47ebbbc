#pragma once

#include <cstddef>
#include <span>

namespace bench {

/// What a collective at least has to do with memory, without any waiting.
void copy(std::span<const float> from, std::span<float> to);

/// Adds each element of `from` to that of `to`.
void add(std::span<const float> from, std::span<float> to);

} // namespace bench
