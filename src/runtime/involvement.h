#pragma once

#include <torch/csrc/autograd/graph_task.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace fsdp::detail {

class Net;

/// Remembers that autograd nodes that this thread makes from now on belong to
/// `net`. Returns the thread, for end_region().
uint64_t begin_region(const std::weak_ptr<Net>& net);
void end_region(const std::weak_ptr<Net>& net, uint64_t thread);

/// The nets that a backward pass from `roots` involves: those whose parameters
/// it reaches, and those in whose regions its nodes were made (a checkpoint
/// reaches no parameter before it runs), in the order in which they were made.
/// An unrelated pass opens no region.
std::vector<std::shared_ptr<Net>> involved_nets(
    const torch::autograd::edge_list& roots);

} // namespace fsdp::detail
