#pragma once

#include "comm/shm_group.h"

#include <fsdp/communicator.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace fsdp::detail {

/// SharedSlices in the segment of a group. Used by one thread at a time.
class ShmSlices : public SharedSlices {
 public:
  static size_t bytes_for(std::span<const int64_t> slice_bytes, int ranks);

  /// `offset` of bytes_for() bytes of zeros in the segment, the same for all.
  ShmSlices(
      std::shared_ptr<ShmGroup> group,
      size_t offset,
      std::span<const int64_t> slice_bytes);
  ~ShmSlices() override;
  ShmSlices(const ShmSlices&) = delete;
  ShmSlices& operator=(const ShmSlices&) = delete;

  /// Takes the memory of this rank's slices.
  void reserve();

  std::span<std::byte> own(size_t buffer) override;
  std::span<const std::byte> whole(size_t buffer) override;
  void publish() override;
  void await_published(const std::string& what) override;
  void retire() override;
  void await_retired(const std::string& what) override;

 private:
  struct Buffer {
    size_t offset = 0; // in the segment
    size_t slice_bytes = 0;
  };
  struct Line; // what a rank shows to the others

  Line& line(int rank) const;
  void add_one(std::atomic<uint64_t> Line::*count);
  /// Waits until the count of all is at least this rank's.
  void await(const std::string& what, std::atomic<uint64_t> Line::*count) const;

  std::shared_ptr<ShmGroup> group_;
  size_t offset_;
  size_t bytes_;
  std::vector<Buffer> buffers_;
};

} // namespace fsdp::detail
