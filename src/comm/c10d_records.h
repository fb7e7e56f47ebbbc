#pragma once

#include "comm/call.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::detail {

// What ranks write for each other, into the store or into a message.

/// The end of a rank's epoch.
struct FailureRecord {
  uint64_t limit = 0; // the first call of the epoch that will not be complete
  std::string text;
};

/// Where a rank waits.
struct WaitMark {
  std::string channel;
  uint64_t epoch = 0;
  uint64_t calls = 0;                                // made in this epoch
  uint64_t waits_for = 0;                            // the number of a call
  std::vector<std::pair<uint64_t, Call>> open_calls; // not complete yet
};

std::string encode(const FailureRecord& record);
std::string encode(const WaitMark& mark);

// Throw CommunicationError for bytes that are none.
FailureRecord decode_failure(std::string_view bytes);
WaitMark decode_mark(std::string_view bytes);

/// A call with its long texts and lists cut off: encode_call() of it takes at
/// most kShortCallBytes.
Call shortened(Call call);
inline constexpr size_t kShortCallBytes = 1024;

/// Of everything that must be the same on all ranks.
uint64_t hash_of(const Call& call);

/// What all ranks throw when two of them call different things: the same text,
/// whichever of the two writes it.
std::string difference_of(
    const Call& call,
    int rank,
    const Call& other_call,
    int other_rank,
    int size);

} // namespace fsdp::detail
