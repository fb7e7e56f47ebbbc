#pragma once

#include "comm/call.h"
#include "comm/shm_group.h"

#include <fsdp/communicator.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp::detail {

/// A reduction over the ranks of which rank r gets the part from cut r to cut
/// r + 1. It shares what others need of its input and reads its own part where
/// that lies.
struct ShmReduction {
  Call call;
  std::vector<int64_t> cuts; // elements
  std::vector<Piece> input;
  size_t me;

  /// The same in bytes.
  size_t cut(size_t r) const {
    return static_cast<size_t>(cuts[r] * size_of(*call.dtype));
  }

  Stores stores() const;

  ShmContribution contribution() const;

  /// Reduces this rank's part into `output`, in rank order.
  void deliver(const ShmPayloads& payloads, std::byte* output) const;
};

} // namespace fsdp::detail
