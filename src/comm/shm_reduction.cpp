#include "comm/shm_reduction.h"

#include "comm/pieces.h"
#include "comm/reduce.h"

#include <cstring>

namespace fsdp::detail {

ShmContribution ShmReduction::contribution() const {
  const size_t ranks = cuts.size() - 1;
  return {
      .pieces = input,
      .size = cut(ranks),
      .skip_begin = cut(me),
      .skip_end = cut(me + 1),
      .stores = stores()};
}

Stores ShmReduction::stores() const {
  const size_t ranks = cuts.size() - 1;
  return stores_for(cut(ranks) * (3 * ranks - 2));
}

void ShmReduction::deliver(const ShmPayloads& payloads, std::byte* output)
    const {
  // Where this rank's part begins: each left out the part that only it needs.
  const auto part_of = [&](size_t r) {
    const size_t left_out = r < me ? cut(r + 1) - cut(r) : 0;
    return payloads[r].data() + (cut(me) - left_out);
  };
  std::vector<const std::byte*> inputs(payloads.size());
  visit_pieces(
      input,
      cut(me),
      cut(me + 1),
      [&](size_t offset, const std::byte* data, size_t bytes) {
        const size_t at = offset - cut(me);
        for (size_t r = 0; r < inputs.size(); ++r) {
          inputs[r] = r == me ? data : part_of(r) + at;
        }
        if (data == nullptr) { // zeros
          std::memset(output + at, 0, bytes);
          inputs[me] = output + at;
        }
        reduce(
            *call.op,
            *call.dtype,
            inputs,
            output + at,
            static_cast<int64_t>(bytes) / size_of(*call.dtype),
            stores());
      });
}

} // namespace fsdp::detail
