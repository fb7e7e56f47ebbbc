#include <fsdp/description.h>

#include <fsdp/memory.h>

#include <ostream>

namespace fsdp {

namespace {

const char* name_of(Strategy strategy) {
  switch (strategy) {
    case Strategy::kFullShard:
      return "full shard";
    case Strategy::kShardGradOp:
      return "shard grad op";
    case Strategy::kShardOptimizer:
      return "shard optimizer";
    case Strategy::kNoShard:
      return "no shard";
    case Strategy::kHybridShard:
      return "hybrid shard";
    case Strategy::kHybridShardGradOp:
      return "hybrid shard grad op";
  }
  return "unknown";
}

void print_sizes(std::ostream& out, const std::vector<int64_t>& sizes) {
  out << "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    out << (i == 0 ? "" : ", ") << sizes[i];
  }
  out << "]";
}

} // namespace

std::ostream& operator<<(std::ostream& out, const NetDescription& net) {
  out << "rank " << net.rank << "/" << net.world_size << ", "
      << net.units.size() << " units\n";
  for (const auto& unit : net.units) {
    out << "unit '" << unit.name << "' (" << name_of(unit.strategy)
        << "): " << unit.whole_bytes << " bytes whole, " << unit.shard_bytes
        << " bytes here\n";
    for (const auto& parameter : unit.parameters) {
      out << "  ";
      for (const auto& name : parameter.names) {
        out << name << " ";
      }
      print_sizes(out, parameter.sizes);
      out << " " << parameter.dtype
          << (parameter.requires_grad ? "" : ", frozen") << ", "
          << parameter.local_numel << " elements here\n";
    }
  }
  return out;
}

std::ostream& operator<<(std::ostream& out, const MemoryReport& memory) {
  return out << "parameters " << memory.shard_bytes << " of "
             << memory.whole_model_bytes << " bytes, gradients "
             << memory.gradient_bytes << ", unreduced gradients "
             << memory.unreduced_gradient_bytes << ", gathered "
             << memory.gathered_bytes << " (peak " << memory.peak_gathered_bytes
             << ")";
}

} // namespace fsdp
