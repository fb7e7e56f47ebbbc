#pragma once

#include <fsdp/export.h>

#include <cstdint>
#include <iosfwd>

namespace fsdp {

/// Bytes that a net holds on this rank.
struct MemoryReport {
  int64_t shard_bytes = 0;    // parameters at rest, with padding
  int64_t gradient_bytes = 0; // .grad
  /// Whole gradients before their reduction, and what has been reduced while
  /// the backward pass goes on.
  int64_t unreduced_gradient_bytes = 0;
  int64_t gathered_bytes = 0;      // whole weights that live now
  int64_t peak_gathered_bytes = 0; // since reset_peak_memory()
  int64_t whole_model_bytes = 0;   // the parameters, unsharded, for comparison
};

FSDP_API std::ostream& operator<<(
    std::ostream& out,
    const MemoryReport& memory);

} // namespace fsdp
