#pragma once

#include "comm/shm_host.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace fsdp::detail {

/// Where one rank lays its contributions to the calls of one group, for the
/// others to read. It has room for two contributions of the largest size: one
/// is written while the other is read.
class ShmArena {
 public:
  /// A block is lent from add() until `is_free` says that nobody reads it.
  using IsFree = std::function<bool(uint64_t epoch, uint64_t call)>;

  ShmArena(std::shared_ptr<ShmHost> host, IsFree is_free);
  ShmArena(const ShmArena&) = delete;
  ShmArena& operator=(const ShmArena&) = delete;

  /// Offset in the segment of `bytes` bytes for a call, or nothing while others
  /// still read too much.
  std::optional<size_t> add(size_t bytes, uint64_t epoch, uint64_t call);

  /// Takes the memory for blocks of `bytes` bytes now.
  void reserve(size_t bytes);

  /// Whether nobody reads a block any more.
  bool is_empty();

  /// Gives back what nobody reads.
  void close();

 private:
  struct Block {
    size_t begin = 0;
    size_t end = 0;
    uint64_t epoch = 0;
    uint64_t call = 0;
  };
  struct Extent {
    size_t begin = 0;
    size_t end = 0;
    std::vector<Block> blocks; // by address
  };

  static std::optional<size_t> insert(Extent& extent, const Block& block);
  void drop_free_blocks();
  void grow(size_t bytes);

  std::shared_ptr<ShmHost> host_;
  IsFree is_free_;
  std::vector<Extent> extents_; // all but the last are to go
};

} // namespace fsdp::detail
