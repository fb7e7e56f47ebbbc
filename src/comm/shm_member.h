#pragma once

#include "comm/deadline.h"
#include "comm/peer_process.h"
#include "comm/shm_memory.h"
#include "comm/shm_message.h"
#include "comm/shm_segment.h"
#include "comm/unix_socket.h"

#include <memory>
#include <string>
#include <vector>

namespace fsdp::detail {

/// One rank's talk with rank 0.
class ShmTalk {
 public:
  /// Says hello to rank 0, who listens at the other end of `socket`. Throws
  /// CommunicationError when it belongs to another user.
  ShmTalk(
      UnixSocket socket,
      const ShmAddress& address,
      size_t capacity,
      const Deadline& deadline);

  void say(const ShmMessage& message);

  /// Waits for the next message, which must be of this kind. Throws
  /// CommunicationError with the text of a refusal or failure, when rank 0 ends
  /// and when the time is over.
  ShmMessage hear(ShmMessage::Kind kind, std::vector<FileDescriptor>& out);

 private:
  bool wait(const Deadline& deadline, Packet& packet);

  UnixSocket socket_;
  PeerProcess leader_;
  std::string title_; // of rank 0, for messages
  const Deadline& deadline_;
};

/// A rank other than 0 while the ranks meet.
class ShmMember {
 public:
  ShmMember(const ShmAddress& address, ShmMemory& memory);

  /// See detail::meet().
  std::vector<PeerProcess> meet();

 private:
  UnixSocket connect() const;
  std::vector<PeerProcess> take_memory(ShmTalk& talk);

  const ShmAddress& address_;
  ShmMemory& memory_;
  Deadline deadline_;
};

} // namespace fsdp::detail
