#include "comm/split_group.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fsdp::detail {
namespace {

struct SplitChoice {
  int color;
  int key;
};

SplitChoice decode_split(const std::string& bytes) {
  SplitChoice choice{};
  std::memcpy(&choice, bytes.data(), sizeof(choice));
  return choice;
}

} // namespace

std::string encode_split(int color, int key) {
  const SplitChoice choice = {color, key};
  return {reinterpret_cast<const char*>(&choice), sizeof(choice)};
}

SplitGroup group_of_split(const std::vector<std::string>& choices, int rank) {
  const int color = decode_split(choices[static_cast<size_t>(rank)]).color;
  std::vector<std::pair<int, int>> members; // key, rank
  for (size_t r = 0; r < choices.size(); ++r) {
    const SplitChoice its = decode_split(choices[r]);
    if (its.color == color) {
      members.emplace_back(its.key, static_cast<int>(r));
    }
  }
  std::sort(members.begin(), members.end());
  SplitGroup group;
  for (const auto& [key, member] : members) {
    if (member == rank) {
      group.position = static_cast<int>(group.ranks.size());
    }
    group.ranks.push_back(member);
  }
  return group;
}

} // namespace fsdp::detail
