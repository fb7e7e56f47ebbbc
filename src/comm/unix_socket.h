#pragma once

#include "comm/file_descriptor.h"

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::detail {

/// A message and the descriptors that came with it.
struct Packet {
  std::string bytes;
  std::vector<FileDescriptor> descriptors;
};

/// Who was at the other end when the connection was made.
struct PeerCredentials {
  pid_t pid = 0; // 0 when it is not visible in this process's namespace
  uid_t uid = 0;
};

/// A socket that keeps messages apart (SOCK_SEQPACKET), at an abstract address:
/// a name without a file, which is gone as soon as nobody listens. No call
/// waits. Failures of the system throw CommunicationError.
class UnixSocket {
 public:
  enum class SendResult : uint8_t { kSent, kBusy, kClosed };
  enum class ReceiveResult : uint8_t { kPacket, kNothing, kClosed };

  /// How many descriptors a message can carry.
  static constexpr size_t kMostDescriptors = 16; // Linux allows 253

  /// Nothing when somebody else has the name.
  static std::optional<UnixSocket> listen(const std::string& name);

  /// Nothing when nobody listens, or is too busy to take more.
  static std::optional<UnixSocket> connect(const std::string& name);

  /// The next who connected, if any.
  std::optional<UnixSocket> accept();

  /// Stops listening, also where a child has inherited the socket.
  void stop_listening();

  SendResult send(std::string_view bytes, std::span<const int> descriptors);
  ReceiveResult receive(Packet& packet);

  PeerCredentials peer_credentials() const;

  /// A pidfd of the process at the other end; absent when it has ended.
  FileDescriptor peer_process() const;

  /// For poll().
  int descriptor() const { return socket_.get(); }

 private:
  explicit UnixSocket(FileDescriptor socket) : socket_(std::move(socket)) {}
  static UnixSocket make();

  FileDescriptor socket_;
};

/// A pidfd of a process; absent when it has ended.
FileDescriptor open_process(pid_t pid);

} // namespace fsdp::detail
