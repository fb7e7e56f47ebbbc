#include "comm/shm_message.h"

#include <cstring>
#include <type_traits>

namespace fsdp::detail {
namespace {

// This start never changes, in no version, so that a process that is refused
// for its version can read why.
struct ShmMessageHeader {
  uint64_t magic = 0;
  uint32_t version = 0;
  uint32_t kind = 0;
  int32_t rank = 0;
  int32_t size = 0;
  uint64_t bytes = 0;
};
static_assert(sizeof(ShmMessageHeader) == 32);
static_assert(std::is_trivially_copyable_v<ShmMessageHeader>);

constexpr uint64_t kShmMessageMagic = 0x316d687370647366; // "fsdpshm1"
constexpr size_t kMostText = 4096;

} // namespace

std::string ShmMessage::encode() const {
  const ShmMessageHeader header{
      kShmMessageMagic,
      version,
      static_cast<uint32_t>(kind),
      rank,
      size,
      bytes};
  std::string result(sizeof header, '\0');
  std::memcpy(result.data(), &header, sizeof header);
  return result + text.substr(0, kMostText);
}

std::optional<ShmMessage> ShmMessage::decode(std::string_view bytes) {
  ShmMessageHeader header;
  if (bytes.size() < sizeof header) {
    return std::nullopt;
  }
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != kShmMessageMagic) {
    return std::nullopt;
  }
  return ShmMessage{
      static_cast<Kind>(header.kind),
      header.version,
      header.rank,
      header.size,
      header.bytes,
      std::string(bytes.substr(sizeof header))};
}

} // namespace fsdp::detail
