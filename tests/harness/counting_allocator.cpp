#include "harness/counting_allocator.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace fsdp::testing {

namespace {

constexpr size_t kHeaderBytes = 64; // keeps the alignment of libtorch
constexpr size_t kMostPoisonedBytes = 1 << 20;

thread_local MemoryAccount* current_account = nullptr;

struct Header {
  MemoryAccount* account;
  size_t nbytes;
};

void book(MemoryAccount* account, int64_t nbytes) {
  if (account == nullptr) {
    return;
  }
  const auto live = account->live_bytes += nbytes;
  auto peak = account->peak_bytes.load();
  while (peak < live &&
         !account->peak_bytes.compare_exchange_weak(peak, live)) {}
}

void poison(void* memory, size_t nbytes) {
  std::memset(memory, 0xff, std::min(nbytes, kMostPoisonedBytes));
}

void release(void* memory) {
  if (memory == nullptr) {
    return;
  }
  void* base = static_cast<char*>(memory) - kHeaderBytes;
  const auto header = *static_cast<Header*>(base);
  book(header.account, -static_cast<int64_t>(header.nbytes));
  poison(memory, header.nbytes);
  std::free(base);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* base = nullptr;
    if (nbytes == 0) {
      return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    }
    if (posix_memalign(&base, kHeaderBytes, kHeaderBytes + nbytes) != 0) {
      throw std::bad_alloc();
    }
    new (base) Header{current_account, nbytes};
    book(current_account, static_cast<int64_t>(nbytes));
    void* memory = static_cast<char*>(base) + kHeaderBytes;
    poison(memory, nbytes);
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* dest, const void* src, std::size_t count)
      const override {
    default_copy_data(dest, src, count);
  }
};

[[maybe_unused]] const bool installed = [] {
  static CountingAllocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/100);
  return true;
}();

} // namespace

BookedOn::BookedOn(MemoryAccount& account) : previous_(current_account) {
  current_account = &account;
}

BookedOn::~BookedOn() {
  current_account = previous_;
}

} // namespace fsdp::testing
