#pragma once

#include <atomic>
#include <cstdint>

namespace fsdp::testing {

/// Bytes that the tensors of one rank hold. All test programs allocate CPU
/// tensors through an allocator that counts, and that fills memory with 0xff
/// (NaN in every floating point type) when it hands it out and when it takes it
/// back, so that stale or uninitialised values show.
struct MemoryAccount {
  std::atomic<int64_t> live_bytes{0};
  std::atomic<int64_t> peak_bytes{0};

  void reset_peak() { peak_bytes = live_bytes.load(); }
};

/// While one lives, what this thread allocates is booked on its account (and
/// taken off there, whoever frees it). Accounts must outlive these tensors.
class BookedOn {
 public:
  explicit BookedOn(MemoryAccount& account);
  ~BookedOn();
  BookedOn(const BookedOn&) = delete;
  BookedOn& operator=(const BookedOn&) = delete;

 private:
  MemoryAccount* previous_;
};

} // namespace fsdp::testing
