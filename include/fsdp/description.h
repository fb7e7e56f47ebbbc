#pragma once

#include <fsdp/export.h>
#include <fsdp/unit_options.h>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace fsdp {

/// How a net is cut, for people and for planning.
struct NetDescription {
  struct Parameter {
    std::vector<std::string> names; // several when it is tied
    std::vector<int64_t> sizes;     // whole
    at::ScalarType dtype = at::kFloat;
    bool requires_grad = true;
    int64_t local_numel = 0; // elements of it that this rank owns
  };
  struct Unit {
    std::string name; // empty for the root
    Strategy strategy = Strategy::kFullShard;
    int64_t whole_bytes = 0; // gathered, in the compute dtype, with padding
    int64_t shard_bytes = 0; // this rank's slice at rest
    std::vector<Parameter> parameters;
  };
  int rank = 0;
  int world_size = 1;
  std::vector<Unit> units;
};

FSDP_API std::ostream& operator<<(std::ostream& out, const NetDescription& net);

} // namespace fsdp
