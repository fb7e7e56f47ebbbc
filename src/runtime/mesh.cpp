#include "runtime/mesh.h"

#include "runtime/errors.h"

#include <algorithm>
#include <utility>

namespace fsdp::detail {

std::unique_ptr<Mesh> Mesh::of_world(Communicator& world) {
  return of_groups(world, world.size());
}

std::unique_ptr<Mesh> Mesh::of_groups(Communicator& world, int shards) {
  auto mesh = std::make_unique<Mesh>();
  mesh->shards = shards;
  mesh->position = world.rank() % shards;
  const int group = world.rank() / shards;
  communicate([&] {
    mesh->gather = world.split(group, world.rank());
    mesh->reduce = world.split(group, world.rank());
    if (shards < world.size()) {
      mesh->replicas = world.split(mesh->position, world.rank());
    }
  });
  return mesh;
}

void Mesh::add_part(Communicator& world, int64_t ranks) {
  if (ranks >= shards || parts.count(ranks) > 0) {
    return;
  }
  communicate([&] {
    parts[ranks] =
        world.split(world.rank() / static_cast<int>(ranks), world.rank());
  });
}

void Mesh::share_weights(std::span<const int64_t> slice_bytes) {
  const bool any =
      std::any_of(slice_bytes.begin(), slice_bytes.end(), [](int64_t bytes) {
        return bytes > 0;
      });
  if (!any) {
    return;
  }
  communicate([&] {
    if (auto slices = gather->share_slices(slice_bytes)) {
      shared = std::make_unique<SharedWeights>(std::move(slices));
    }
  });
}

void Mesh::each_communicator(
    const std::function<void(Communicator&)>& visit) const {
  visit(*gather);
  visit(*reduce);
  if (replicas != nullptr) {
    visit(*replicas);
  }
  for (const auto& [ranks, part] : parts) {
    visit(*part);
  }
}

} // namespace fsdp::detail
