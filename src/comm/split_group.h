#pragma once

#include <string>
#include <vector>

namespace fsdp::detail {

/// What a rank tells the others when it splits a group.
std::string encode_split(int color, int key);

/// The group that a rank belongs to after a split.
struct SplitGroup {
  std::vector<int> ranks; // as the group that was split numbers them
  int position = 0;       // of the rank among them
};

/// `choices` are the encode_split() of all ranks, by rank.
SplitGroup group_of_split(const std::vector<std::string>& choices, int rank);

} // namespace fsdp::detail
