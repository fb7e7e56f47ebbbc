#pragma once

#include <optional>
#include <string>
#include <vector>

namespace fsdp::detail {

/// The host names of a Slurm node list, in order:
/// "node[03-05,9]-ib,other" -> node03-ib node04-ib node05-ib node9-ib other.
/// Brackets may occur several times in a name. Nothing where the list is not
/// well formed, or names more than 65536 hosts.
std::optional<std::vector<std::string>> expand_node_list(
    const std::string& list);

/// The numbers of a Slurm list of tasks per node: "2(x3),1" -> 2 2 2 1. Nothing
/// where the list is not well formed.
std::optional<std::vector<int>> expand_task_list(const std::string& list);

} // namespace fsdp::detail
