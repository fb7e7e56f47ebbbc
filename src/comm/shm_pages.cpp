#include "comm/shm_pages.h"

#include "comm/memory_limits.h"
#include "comm/system_failure.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <vector>

namespace fsdp::detail {
namespace {

// Small enough that a signal which comes every few milliseconds, such as a
// profiler's, does not interrupt fallocate() each time.
constexpr size_t kPieceBytes = size_t{16} << 20;
constexpr int kMadvPopulateWrite = 23; // MADV_POPULATE_WRITE, Linux 5.14

struct PageInterval {
  size_t begin = 0;
  size_t end = 0;
};

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

// The parts of `range` that take no memory so far.
std::vector<PageInterval> find_holes(int memory, PageInterval range) {
  std::vector<PageInterval> holes;
  size_t position = range.begin;
  while (position < range.end) {
    const off_t hole = ::lseek(memory, static_cast<off_t>(position), SEEK_HOLE);
    if (hole < 0) {
      throw_system_failure("lseek(SEEK_HOLE)");
    }
    const auto begin = static_cast<size_t>(hole);
    if (begin >= range.end) {
      break;
    }
    const off_t data = ::lseek(memory, hole, SEEK_DATA); // fails at the end
    position = data < 0 ? range.end : static_cast<size_t>(data);
    holes.push_back({begin, std::min(position, range.end)});
  }
  return holes;
}

std::string shortage_text(
    const std::string& owner,
    size_t wanted,
    const MemoryLimits& limits,
    const std::string& failure) {
  return owner + " wants " + byte_text(wanted) + " more of shared memory" +
      failure + ", but " + limits.text() +
      " are available. Run fewer ranks on this host or a smaller model, or "
      "give "
      "it more memory.";
}

// Whether the system took the pages back.
bool punch_hole(int memory, PageInterval pages) {
  return ::fallocate(
             memory,
             FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
             static_cast<off_t>(pages.begin),
             static_cast<off_t>(pages.end - pages.begin)) == 0;
}

void check_room(const std::string& owner, size_t wanted) {
  const MemoryLimits limits = MemoryLimits::now();
  // Page tables come on top: 8 bytes per page, view and rank that reads it.
  if (wanted + wanted / 64 > limits.available) {
    throw CommunicationError(shortage_text(owner, wanted, limits, ""));
  }
}

// A write to each page that changes nothing, whoever else writes there.
void touch_pages(std::byte* begin, size_t bytes) {
  for (size_t i = 0; i < bytes; i += page_bytes()) {
    std::atomic_ref<unsigned char> byte(
        *reinterpret_cast<unsigned char*>(begin + i));
    unsigned char value = byte;
    byte.compare_exchange_strong(value, value);
  }
}

// First fallocate(), which fails where a page fault would kill the process.
// Then the page tables, which also marks the pages as data for find_holes().
void take_piece(
    int memory,
    std::byte* base,
    PageInterval piece,
    const std::string& owner) {
  const size_t bytes = piece.end - piece.begin;
  int result = 0;
  do {
    result = ::fallocate(
        memory,
        FALLOC_FL_KEEP_SIZE,
        static_cast<off_t>(piece.begin),
        static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    const std::string failure = " (" + system_failure("fallocate") + ")";
    throw CommunicationError(
        shortage_text(owner, bytes, MemoryLimits::now(), failure));
  }
  if (::madvise(base + piece.begin, bytes, kMadvPopulateWrite) != 0) {
    touch_pages(base + piece.begin, bytes);
  }
}

} // namespace

void take_pages(
    int memory,
    std::byte* base,
    size_t offset,
    size_t bytes,
    const std::string& owner) {
  const size_t page = page_bytes();
  const auto holes = find_holes(
      memory,
      {offset / page * page, (offset + bytes + page - 1) / page * page});
  size_t wanted = 0;
  for (const PageInterval& hole : holes) {
    wanted += hole.end - hole.begin;
  }
  std::vector<PageInterval> taken;
  try {
    for (const PageInterval& hole : holes) {
      for (size_t begin = hole.begin; begin < hole.end;) {
        const PageInterval piece{
            begin, std::min(begin + kPieceBytes, hole.end)};
        check_room(owner, wanted);
        taken.push_back(piece);
        take_piece(memory, base, piece, owner);
        wanted -= piece.end - piece.begin;
        begin = piece.end;
      }
    }
  } catch (...) {
    for (const PageInterval& piece : taken) {
      punch_hole(memory, piece);
    }
    throw;
  }
}

void release_pages(int memory, size_t offset, size_t bytes) {
  const size_t page = page_bytes();
  const size_t begin = (offset + page - 1) / page * page;
  const size_t end = (offset + bytes) / page * page;
  if (begin < end && !punch_hole(memory, {begin, end})) {
    throw_system_failure("fallocate(FALLOC_FL_PUNCH_HOLE)");
  }
}

} // namespace fsdp::detail
