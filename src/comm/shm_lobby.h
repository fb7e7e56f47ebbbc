#pragma once

#include "comm/deadline.h"
#include "comm/shm_message.h"
#include "comm/unix_socket.h"

#include <poll.h>

#include <optional>
#include <string>
#include <vector>

namespace fsdp::detail {

/// Where rank 0 meets the processes that connect, until each has said what rank
/// it is. Who says nothing delays nobody else.
class ShmLobby {
 public:
  struct Guest {
    UnixSocket socket;
    PeerCredentials who;
    Deadline limit; // to say hello
  };
  struct Arrival {
    Guest guest;
    ShmMessage hello;
  };

  /// Nothing when another process has the name.
  static std::optional<ShmLobby> open(const std::string& name);

  /// Those who have said hello since the last call, of this process's user. The
  /// others are refused or waited for. Never waits.
  std::vector<Arrival> arrivals();

  /// Tells a process why it cannot join.
  void refuse(Guest& guest, const std::string& reason);

  /// Refuses all that are still here, and listens no more.
  void close(const std::string& reason);

  /// What to poll() for, and whether somebody's time runs.
  void add_entries(std::vector<pollfd>& entries) const;
  bool has_guests() const { return !guests_.empty(); }

  /// The last reason that was given; empty when nobody was refused.
  const std::string& last_refusal() const { return last_refusal_; }

 private:
  ShmLobby(std::string name, UnixSocket listener);

  void accept_guests();
  /// Whether the guest has said its word, or missed its time.
  bool greet(Guest& guest, std::vector<Arrival>& out);

  std::string name_;
  UnixSocket listener_;
  std::vector<Guest> guests_;
  std::string last_refusal_;
};

} // namespace fsdp::detail
