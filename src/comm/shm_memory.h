#pragma once

#include "comm/file_descriptor.h"

#include <cstddef>
#include <cstdint>
#include <string>

namespace fsdp::detail {

/// Shared memory without a name, and this process's two views of it. A forked
/// child has neither.
class ShmMemory {
 public:
  /// Keeps address space for two views of `bytes` bytes, or of fewer when the
  /// system does not give that much. `owner` is for messages: "rank 1/4".
  ShmMemory(std::string owner, size_t bytes);
  ~ShmMemory();
  ShmMemory(const ShmMemory&) = delete;
  ShmMemory& operator=(const ShmMemory&) = delete;

  /// How much there is address space for.
  size_t capacity() const { return capacity_; }

  /// Makes memory of `bytes` bytes, at most capacity(), and its views. Its size
  /// never changes, so that nobody can take pages from under the others.
  void create(size_t bytes);

  /// Makes views of memory that another process has created.
  void adopt(FileDescriptor memory, size_t bytes);

  const FileDescriptor& descriptor() const { return memory_; }
  std::byte* data() { return base_; }
  const std::byte* read_only_data() const { return base_ + bytes_; }
  size_t bytes() const { return bytes_; }

  /// Whether this process has inherited this instead of making it.
  bool forked() const { return generation_ != fork_generation(); }

  /// As of ShmSegment.
  void reserve(size_t offset, size_t bytes);
  void release(size_t offset, size_t bytes);

 private:
  bool reserve_addresses(size_t bytes);
  void free_addresses();
  void map_views();
  void check_range(const char* call, size_t offset, size_t bytes) const;

  std::string owner_;
  uint64_t generation_ = 0;
  FileDescriptor memory_;
  void* addresses_ = nullptr; // all that was reserved
  size_t address_bytes_ = 0;
  std::byte* base_ = nullptr; // the writable view, the other one follows it
  size_t capacity_ = 0;
  size_t bytes_ = 0;
};

} // namespace fsdp::detail
