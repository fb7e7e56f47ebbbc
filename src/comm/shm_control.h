#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace fsdp::detail {

// What processes see in a ShmSegment. Zeros are the initial state of all of it,
// and each field has one writer unless it says otherwise, so that no death can
// leave a lock held.

static_assert(std::atomic<uint64_t>::is_always_lock_free);

/// A text that others may read while it is written; it can then be torn, so it
/// is for messages only.
template <size_t kBytes>
class SharedText {
 public:
  void store(std::string_view text) {
    constexpr std::string_view kCut = "...";
    std::array<char, kBytes> bytes{};
    const size_t copied = text.copy(bytes.data(), kBytes - 1);
    if (copied < text.size()) {
      kCut.copy(&bytes[copied - kCut.size()], kCut.size());
    }
    for (size_t i = 0; i < words_.size(); ++i) {
      uint64_t word = 0;
      std::memcpy(&word, bytes.data() + i * sizeof(word), sizeof(word));
      words_[i].store(word, std::memory_order_relaxed);
    }
  }

  std::string load() const {
    std::array<char, kBytes> bytes{};
    for (size_t i = 0; i < words_.size(); ++i) {
      const uint64_t word = words_[i].load(std::memory_order_relaxed);
      std::memcpy(bytes.data() + i * sizeof(word), &word, sizeof(word));
    }
    return std::string(
        bytes.begin(), std::find(bytes.begin(), bytes.end(), '\0'));
  }

 private:
  std::array<std::atomic<uint64_t>, kBytes / sizeof(uint64_t)> words_;
};

/// One call of one rank: where in the segment its contribution lies.
struct ShmDescriptor {
  uint64_t header_offset; // the encoded Call
  uint64_t header_bytes;
  uint64_t payload_offset;
  uint64_t payload_bytes;
};

/// An epoch of one rank.
struct ShmEpoch {
  std::atomic<uint64_t> first; // contribution of this rank, of all it has made
  // Once it has ended:
  std::atomic<uint64_t> calls; // that the rank had contributed to
  SharedText<1024> failure;
};

enum class ShmGone : uint32_t { kNo, kGone, kGoneByException };

/// What one rank shows to the others of a group: see [Note: Calls in shared
/// memory].
struct alignas(128) ShmRankLine {
  static constexpr uint64_t kEpochs = 32; // that a rank may be ahead of others
  static constexpr uint64_t kCalls = 64; // contributed and not yet taken by all

  std::atomic<uint64_t> epoch;
  std::atomic<uint64_t> contributed; // calls, of all epochs: never goes back
  std::atomic<uint64_t> taken;       // calls of this epoch whose result it has
  std::atomic<ShmGone> gone;
  std::atomic<uint32_t> reads_no_more;
  SharedText<120> last_call; // that it has made

  /// Where it sleeps. Peers add to the bell, and read for whom it waits: 1 + a
  /// rank, or 0 while it is awake.
  alignas(128) std::atomic<uint32_t> bell;
  std::atomic<uint32_t> waits_for;

  /// Of all contributions of this rank, modulo their number.
  alignas(128) std::array<ShmDescriptor, kCalls> calls;
  std::array<ShmEpoch, kEpochs> epochs; // modulo their number
};

/// In front of the lines of a group.
struct alignas(128) ShmGroupHeader {
  std::atomic<uint32_t> members_gone; // written by all
};

/// At the start of a segment.
struct alignas(128) ShmSegmentHeader {
  static constexpr size_t kMaxRanks = 1024;

  std::atomic<uint64_t> used_bytes; // address space; written by all
  std::atomic<uint32_t> aborted_by; // 1 + the first rank; written by all
  // By rank:
  std::array<std::atomic<uint32_t>, kMaxRanks> left;
  std::array<std::atomic<uint64_t>, kMaxRanks> returned; // ShmReturnedRange
  std::array<SharedText<2048>, kMaxRanks> abort_texts;
};

/// At the start of address space that goes back to the rank that allocated it:
/// a list, from the last to the first. Others add to it, its rank takes all.
struct ShmReturnedRange {
  uint64_t next_offset; // 0: none
  uint64_t bytes;
};

} // namespace fsdp::detail
