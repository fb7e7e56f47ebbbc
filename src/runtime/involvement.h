#pragma once

#include <torch/csrc/autograd/graph_task.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace fsdp::detail {

class Net;

/// Remembers that autograd nodes with sequence numbers [begin, end) of this
/// thread were made while a region of `net` was open.
void record_region(
    const std::weak_ptr<Net>& net,
    uint64_t begin,
    uint64_t end);

/// The nets that a backward pass from `roots` involves: those whose parameters
/// it reaches, and those in whose regions its nodes were made (a checkpoint
/// reaches no parameter before it runs). An unrelated pass opens no region.
std::vector<std::shared_ptr<Net>> involved_nets(
    const torch::autograd::edge_list& roots);

} // namespace fsdp::detail
