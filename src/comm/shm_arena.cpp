#include "comm/shm_arena.h"

#include <algorithm>
#include <utility>

namespace fsdp::detail {
namespace {

constexpr size_t kAlignment = 64; // for stores past the caches
constexpr size_t kSmallest = size_t{64} << 10;

size_t aligned(size_t bytes) {
  return (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment *
      kAlignment;
}

} // namespace

ShmArena::ShmArena(std::shared_ptr<ShmHost> host, IsFree is_free)
    : host_(std::move(host)),
      is_free_(std::move(is_free)) {
}

void ShmArena::close() {
  drop_free_blocks();
  for (const Extent& extent : std::exchange(extents_, {})) {
    if (extent.blocks.empty()) { // others still read what is left
      host_->free(extent.begin, extent.end - extent.begin);
    }
  }
}

void ShmArena::drop_free_blocks() {
  for (Extent& extent : extents_) {
    std::erase_if(extent.blocks, [&](const Block& block) {
      return is_free_(block.epoch, block.call);
    });
  }
  while (extents_.size() > 1 && extents_.front().blocks.empty()) {
    host_->free(
        extents_.front().begin, extents_.front().end - extents_.front().begin);
    extents_.erase(extents_.begin());
  }
}

std::optional<size_t> ShmArena::insert(Extent& extent, const Block& block) {
  const size_t bytes = block.end - block.begin;
  size_t begin = extent.begin;
  auto next = extent.blocks.begin();
  for (; next != extent.blocks.end() && next->begin - begin < bytes; ++next) {
    begin = next->end;
  }
  if (next == extent.blocks.end() && extent.end - begin < bytes) {
    return std::nullopt;
  }
  extent.blocks.insert(next, {begin, begin + bytes, block.epoch, block.call});
  return begin;
}

std::optional<size_t>
ShmArena::add(size_t bytes, uint64_t epoch, uint64_t call) {
  drop_free_blocks();
  bytes = aligned(bytes);
  if (extents_.empty() ||
      extents_.back().end - extents_.back().begin < 2 * bytes) {
    grow(bytes);
  }
  return insert(extents_.back(), {0, bytes, epoch, call});
}

void ShmArena::grow(size_t bytes) {
  const size_t length = std::max(kSmallest, 2 * bytes);
  const size_t begin = host_->allocate(length);
  extents_.push_back({begin, begin + length, {}});
}

void ShmArena::reserve(size_t bytes) {
  drop_free_blocks();
  bytes = aligned(bytes);
  if (extents_.empty() ||
      extents_.back().end - extents_.back().begin < 2 * bytes) {
    grow(bytes);
  }
  const Extent& extent = extents_.back();
  host_->segment().reserve(extent.begin, extent.end - extent.begin);
}

bool ShmArena::is_empty() {
  drop_free_blocks();
  return std::all_of(extents_.begin(), extents_.end(), [](const Extent& each) {
    return each.blocks.empty();
  });
}

} // namespace fsdp::detail
