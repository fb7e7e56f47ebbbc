#pragma once

#include "comm/stream_copy.h"

#include <fsdp/communicator.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace fsdp::detail {

/// Reduces `numel` elements of every contribution, in their order, into
/// `output`, which may be one of the contributions. No pointer needs to be
/// aligned. At least one contribution; of one alone the result is a copy.
///
/// kSum: float32 and float64 in their own type, from the first contribution's
/// value on; integers wrap around; 16-bit floats are summed in float32 and
/// rounded once, to nearest even. kMean: the sum, divided by the number of
/// contributions before it is rounded. kMax: NaN wins; of equal values (-0 and
/// +0) the first stays.
void reduce(
    ReduceOp op,
    DType dtype,
    std::span<const std::byte* const> contributions,
    std::byte* output,
    int64_t numel,
    Stores stores = Stores::kCached);

} // namespace fsdp::detail
