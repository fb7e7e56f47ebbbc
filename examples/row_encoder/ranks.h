#pragma once

#include "table.h"

#include <fsdp/fsdp.h>

namespace row_encoder {

/// The part of `rows` that this rank works on. Parts are equal where the number
/// of ranks divides the rows; otherwise the first ones have one row more.
at::Tensor part_of(const at::Tensor& rows, const fsdp::World& world);

/// `value` of all ranks, added up or the largest. `what` names it in errors.
/// Collective.
double
sum_over_ranks(const fsdp::World& world, double value, const std::string& what);
double largest_over_ranks(
    const fsdp::World& world,
    double value,
    const std::string& what);

} // namespace row_encoder
