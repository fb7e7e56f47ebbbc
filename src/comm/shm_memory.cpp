#include "comm/shm_memory.h"

#include "comm/memory_limits.h"
#include "comm/shm_pages.h"
#include "comm/system_failure.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace fsdp::detail {
namespace {

constexpr size_t kMostBytes = size_t{1} << 46; // so that sums do not overflow

// Views begin where a huge page can, in case the system makes some.
constexpr size_t kViewAlignment = size_t{1} << 21;
constexpr unsigned kMfdNoexecSeal = 8; // MFD_NOEXEC_SEAL, Linux 6.3

size_t align_up(size_t bytes) {
  return (bytes + kViewAlignment - 1) / kViewAlignment * kViewAlignment;
}

// A file larger than the limit is not refused: a signal kills its maker.
size_t largest_file() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 ||
      limit.rlim_cur == RLIM_INFINITY) {
    return kMostBytes;
  }
  return limit.rlim_cur / kViewAlignment * kViewAlignment;
}

FileDescriptor create_memory_file() {
  const ForkHold hold;
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  int memory = ::memfd_create("fsdp", flags | kMfdNoexecSeal);
  if (memory < 0 && errno == EINVAL) {
    memory = ::memfd_create("fsdp", flags);
  }
  return FileDescriptor(hold, memory);
}

void map_view(void* address, size_t bytes, int protection, int memory) {
  const int flags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED;
  if (::mmap(address, bytes, protection, flags, memory, 0) == MAP_FAILED) {
    throw_system_failure("mmap of " + byte_text(bytes));
  }
}

} // namespace

ShmMemory::ShmMemory(std::string owner, size_t bytes)
    : owner_(std::move(owner)),
      generation_(fork_generation()) {
  const size_t wanted = std::min(
      align_up(std::clamp(bytes, size_t{1}, kMostBytes)), largest_file());
  size_t fitting = wanted;
  while (fitting > 0 && !reserve_addresses(fitting)) {
    fitting = fitting / 2 / kViewAlignment * kViewAlignment;
  }
  if (fitting > kViewAlignment && fitting < wanted) {
    // Address space is short, and the rest of the program needs some as well.
    free_addresses();
    fitting = reserve_addresses(align_up(fitting / 2)) ? fitting : 0;
  }
  if (fitting == 0) {
    throw CommunicationError(
        "shared memory: no room for the " + byte_text(bytes) + " of " + owner_ +
        ". Raise the limits on address space (ulimit -v) and on the size of "
        "files (ulimit -f).");
  }
}

ShmMemory::~ShmMemory() {
  // The views of a forked process are not here; something else may be.
  if (!forked()) {
    free_addresses();
  }
}

void ShmMemory::free_addresses() {
  if (addresses_ != nullptr) {
    ::munmap(addresses_, address_bytes_);
    addresses_ = nullptr;
  }
}

bool ShmMemory::reserve_addresses(size_t bytes) {
  const size_t total = 2 * bytes + kViewAlignment;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* addresses = ::mmap(nullptr, total, PROT_NONE, flags, -1, 0);
  if (addresses == MAP_FAILED) {
    return false;
  }
  addresses_ = addresses;
  address_bytes_ = total;
  capacity_ = bytes;
  const auto start = reinterpret_cast<uintptr_t>(addresses);
  base_ = static_cast<std::byte*>(addresses) + (align_up(start) - start);
  return true;
}

void ShmMemory::create(size_t bytes) {
  memory_ = create_memory_file();
  if (!memory_) {
    throw_system_failure("memfd_create");
  }
  if (::ftruncate(memory_.get(), static_cast<off_t>(bytes)) != 0) {
    throw_system_failure("ftruncate to " + byte_text(bytes));
  }
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (::fcntl(memory_.get(), F_ADD_SEALS, seals) != 0) {
    throw_system_failure("fcntl(F_ADD_SEALS)");
  }
  bytes_ = bytes;
  map_views();
}

void ShmMemory::adopt(FileDescriptor memory, size_t bytes) {
  memory_ = std::move(memory);
  bytes_ = bytes;
  map_views();
}

void ShmMemory::map_views() {
  const ForkHold hold; // until children are known to get no view
  map_view(data(), bytes_, PROT_READ | PROT_WRITE, memory_.get());
  map_view(data() + bytes_, bytes_, PROT_READ, memory_.get());
  if (::madvise(data(), 2 * bytes_, MADV_DONTFORK) != 0) {
    throw_system_failure("madvise(MADV_DONTFORK)");
  }
  // Both may be unknown to the system, and nothing depends on them.
  ::madvise(data(), 2 * bytes_, MADV_DONTDUMP);
  ::madvise(data(), 2 * bytes_, MADV_HUGEPAGE);
  std::byte* end = data() + 2 * bytes_;
  const auto used =
      static_cast<size_t>(end - static_cast<std::byte*>(addresses_));
  ::munmap(end, address_bytes_ - used);
  address_bytes_ = used;
}

void ShmMemory::check_range(const char* call, size_t offset, size_t bytes)
    const {
  if (forked()) {
    throw CommunicationError(
        std::string("shared memory: ") + call + " by a fork of " + owner_ +
        ", which has no part in it.");
  }
  if (offset > bytes_ || bytes > bytes_ - offset) {
    throw CommunicationError(
        std::string("shared memory: ") + call + " of " + byte_text(bytes) +
        " at " + byte_text(offset) + " by " + owner_ + ", but its size is " +
        byte_text(bytes_) +
        ". If a limit on address space (ulimit -v) made it small, raise that.");
  }
}

void ShmMemory::reserve(size_t offset, size_t bytes) {
  check_range("reserve", offset, bytes);
  take_pages(memory_.get(), base_, offset, bytes, owner_);
}

void ShmMemory::release(size_t offset, size_t bytes) {
  check_range("release", offset, bytes);
  release_pages(memory_.get(), offset, bytes);
}

} // namespace fsdp::detail
