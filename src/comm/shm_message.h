#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fsdp::detail {

/// What ranks say to one another while they meet. A rank says kHello and rank 0
/// answers kRefused, or kMemory once all have come; then a rank says kReady and
/// rank 0, once all have, kGo. Instead of its next word a rank may say kFailed,
/// which rank 0 hands on to all, or kGaveUp when its time is over.
struct ShmMessage {
  enum class Kind : uint32_t {
    kHello = 1,
    kRefused = 2,
    kMemory = 3,
    kReady = 4,
    kGo = 5,
    kFailed = 6,
    kGaveUp = 7,
  };

  /// Raise it when the meaning of a message or what is in the memory changes.
  static constexpr uint32_t kVersion = 1;

  Kind kind = Kind::kHello;
  uint32_t version = kVersion;
  int32_t rank = 0;   // in kHello
  int32_t size = 0;   // in kHello
  uint64_t bytes = 0; // kHello: address space there is; kMemory: of the memory
  std::string text = {}; // kRefused, kFailed: why. kMemory: pids, as int32_t

  std::string encode() const;

  /// Nothing when `bytes` is not a message of libfsdp. Of a message of another
  /// version only kind, version and text are to be read.
  static std::optional<ShmMessage> decode(std::string_view bytes);
};

} // namespace fsdp::detail
