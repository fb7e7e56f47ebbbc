#pragma once

#include "comm/deadline.h"
#include "comm/peer_process.h"
#include "comm/shm_lobby.h"
#include "comm/shm_memory.h"
#include "comm/shm_message.h"
#include "comm/shm_segment.h"
#include "comm/unix_socket.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace fsdp::detail {

/// Rank 0 while the ranks meet. It never waits for one process alone.
class ShmLeader {
 public:
  ShmLeader(const ShmAddress& address, ShmMemory& memory);

  /// See detail::meet().
  std::vector<PeerProcess> meet();

 private:
  /// A rank that has joined.
  struct Seat {
    UnixSocket socket;
    PeerProcess process;
    size_t capacity = 0;
    bool ready = false;
  };

  void open_lobby();
  void gather();
  void share_memory();
  void await_ready();
  void say_go();
  void tell_all(const std::string& failure);

  void welcome(ShmLobby::Arrival arrival);
  std::string objection(const ShmLobby::Arrival& arrival) const;
  void hear_all();
  void hear(int rank, Seat& seat);
  void send_memory(
      int rank,
      size_t bytes,
      const std::vector<int>& descriptors,
      const std::vector<int32_t>& pids);
  void wait_for_news() const;

  bool send(Seat& seat, const ShmMessage& message, std::span<const int> fds);
  bool all_joined() const;
  bool all_ready() const;
  Seat& seat(int rank);
  /// "start-up: rank 2/4 (pid 4711)".
  std::string title_of(int rank);
  [[noreturn]] void fail_for_end(int rank);
  [[noreturn]] void fail_for_time(const std::string& by_whom = "");

  const ShmAddress& address_;
  ShmMemory& memory_;
  const std::string name_; // of the socket
  Deadline deadline_;
  std::optional<ShmLobby> lobby_;
  std::vector<std::optional<Seat>> seats_; // by rank; none for this one
  PeerProcess self_;
};

} // namespace fsdp::detail
