// Counts the bytes that CPU tensors hold. Loading the library is enough: a C++
// program links it, Python loads it with ctypes, so both are counted alike.

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <atomic>
#include <cstdint>
#include <new>

#define BENCH_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kHeaderBytes = 64; // keeps the alignment of libtorch

std::atomic<int64_t> live_bytes{0};
std::atomic<int64_t> peak_bytes{0};

void count(int64_t nbytes) {
  const auto live = live_bytes += nbytes;
  auto peak = peak_bytes.load();
  while (peak < live && !peak_bytes.compare_exchange_weak(peak, live)) {}
}

void release(void* memory) {
  if (memory != nullptr) {
    void* base = static_cast<char*>(memory) - kHeaderBytes;
    count(-*static_cast<int64_t*>(base));
    c10::free_cpu(base);
  }
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) {
      return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    }
    void* base = c10::alloc_cpu(kHeaderBytes + nbytes);
    new (base) int64_t(static_cast<int64_t>(nbytes));
    count(static_cast<int64_t>(nbytes));
    void* memory = static_cast<char*>(base) + kHeaderBytes;
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* dest, const void* src, std::size_t nbytes)
      const override {
    default_copy_data(dest, src, nbytes);
  }
};

[[maybe_unused]] const bool installed = [] {
  static CountingAllocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/100);
  return true;
}();

} // namespace

BENCH_API int64_t bench_live_bytes() {
  return live_bytes;
}

BENCH_API int64_t bench_peak_bytes() {
  return peak_bytes;
}

BENCH_API void bench_reset_peak() {
  peak_bytes = live_bytes.load();
}
