#pragma once

#include "comm/c10d_backend.h"
#include "comm/c10d_records.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::detail {

/// Where the ranks of a channel wait, as they tell each other through the store
/// once a wait takes long. Nobody else can say who is missing: a back end does
/// not. The methods throw what the store throws.
class C10dMarks {
 public:
  /// `store` is the world's; `world_ranks` are those of the channel, by rank.
  C10dMarks(C10dStorePtr store, std::vector<int> world_ranks, int rank);

  void write(const WaitMark& mark);

  /// Takes this rank's mark away, if there is one. Throws nothing.
  void erase();

  /// The number of a call that is not the same everywhere, and how it differs.
  std::optional<std::pair<uint64_t, std::string>> difference(
      const WaitMark& mine);

  /// The ranks that have not come to the call that `mine` waits for, as in
  /// "ranks 0, 3". Ranks that wait elsewhere are said to.
  std::string missing(const WaitMark& mine);

 private:
  std::optional<WaitMark> of(int rank);

  C10dStorePtr store_;
  std::vector<int> world_ranks_;
  int rank_;
  bool is_written_ = false;
};

} // namespace fsdp::detail
