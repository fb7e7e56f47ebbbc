#include "comm/shm_segment.h"

#include "comm/call.h"
#include "comm/peer_process.h"
#include "comm/shm_memory.h"
#include "comm/shm_rendezvous.h"

#include <unistd.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::detail {
namespace {

void check_address(const ShmAddress& address) {
  if (address.size < 1 || address.rank < 0 || address.rank >= address.size) {
    throw std::invalid_argument(
        "shared memory: rank " + std::to_string(address.rank) +
        " is not one of " + std::to_string(address.size) + " ranks");
  }
  if (address.name.empty()) {
    throw std::invalid_argument("shared memory: the job has no name");
  }
}

/// What all kinds of segments have in common. `memory` may be shared by ranks
/// that are threads.
class MappedSegment : public ShmSegment {
 public:
  MappedSegment(int rank, int size, std::shared_ptr<ShmMemory> memory)
      : rank_(rank),
        size_(size),
        memory_(std::move(memory)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::byte* data() override { return memory_->data(); }
  const std::byte* read_only_data() const override {
    return memory_->read_only_data();
  }
  size_t bytes() const override { return memory_->bytes(); }
  bool forked() const override { return memory_->forked(); }

  void reserve(size_t offset, size_t bytes) override {
    memory_->reserve(offset, bytes);
  }
  void release(size_t offset, size_t bytes) override {
    memory_->release(offset, bytes);
  }

 private:
  int rank_;
  int size_;
  std::shared_ptr<ShmMemory> memory_;
};

class ProcessSegment : public MappedSegment {
 public:
  ProcessSegment(
      const ShmAddress& address,
      std::shared_ptr<ShmMemory> memory,
      std::vector<PeerProcess> processes)
      : MappedSegment(address.rank, address.size, std::move(memory)),
        processes_(std::move(processes)) {}

  bool is_dead(int rank) override {
    return processes_.at(static_cast<size_t>(rank)).ended();
  }

  std::string describe(int rank) override {
    return processes_.at(static_cast<size_t>(rank)).text();
  }

 private:
  std::vector<PeerProcess> processes_; // by rank
};

class ThreadSegment : public MappedSegment {
 public:
  using MappedSegment::MappedSegment;

  // Threads die with their process.
  bool is_dead(int /*rank*/) override { return false; }

  std::string describe(int /*rank*/) override {
    return "thread of " + pid_text(::getpid());
  }
};

} // namespace

std::shared_ptr<ShmSegment> ShmSegment::join(const ShmAddress& address) {
  check_address(address);
  auto memory = std::make_shared<ShmMemory>(
      rank_text(address.rank, address.size), address.bytes);
  auto processes = meet(address, *memory);
  return std::make_shared<ProcessSegment>(
      address, std::move(memory), std::move(processes));
}

std::vector<std::shared_ptr<ShmSegment>> ShmSegment::for_threads(
    int size,
    size_t bytes) {
  if (size < 1) {
    throw std::invalid_argument(
        "shared memory: expected at least 1 rank, but got " +
        std::to_string(size));
  }
  const auto memory = std::make_shared<ShmMemory>(
      std::to_string(size) + " ranks as threads", bytes);
  memory->create(memory->capacity());
  std::vector<std::shared_ptr<ShmSegment>> segments;
  for (int rank = 0; rank < size; ++rank) {
    segments.push_back(std::make_shared<ThreadSegment>(rank, size, memory));
  }
  return segments;
}

} // namespace fsdp::detail
