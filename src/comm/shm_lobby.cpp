#include "comm/shm_lobby.h"

#include "comm/peer_process.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace fsdp::detail {
namespace {

constexpr std::chrono::seconds kHelloLimit(5);

} // namespace

ShmLobby::ShmLobby(std::string name, UnixSocket listener)
    : name_(std::move(name)),
      listener_(std::move(listener)) {
}

std::optional<ShmLobby> ShmLobby::open(const std::string& name) {
  auto listener = UnixSocket::listen(name);
  if (!listener) {
    return std::nullopt;
  }
  return ShmLobby(name, std::move(*listener));
}

std::vector<ShmLobby::Arrival> ShmLobby::arrivals() {
  accept_guests();
  std::vector<Arrival> result;
  guests_.erase(
      std::remove_if(
          guests_.begin(),
          guests_.end(),
          [&](Guest& guest) { return greet(guest, result); }),
      guests_.end());
  return result;
}

void ShmLobby::accept_guests() {
  while (auto socket = listener_.accept()) {
    const PeerCredentials who = socket->peer_credentials();
    Guest guest{std::move(*socket), who, Deadline(kHelloLimit)};
    if (who.uid == ::geteuid()) {
      guests_.push_back(std::move(guest));
    } else {
      refuse(
          guest,
          "start-up: " + pid_text(who.pid) + " belongs to user " +
              std::to_string(who.uid) + ", but rank 0 to user " +
              std::to_string(::geteuid()) + ". Start all ranks as one user.");
    }
  }
}

bool ShmLobby::greet(Guest& guest, std::vector<Arrival>& out) {
  const std::string who = "start-up: " + pid_text(guest.who.pid);
  Packet packet;
  const auto result = guest.socket.receive(packet);
  if (result == UnixSocket::ReceiveResult::kClosed) {
    return true;
  }
  if (result == UnixSocket::ReceiveResult::kNothing) {
    const bool is_late = guest.limit.passed();
    if (is_late) {
      refuse(
          guest,
          who + " connected to '@" + name_ + "', but said nothing for " +
              guest.limit.waited() + ". Start it again.");
    }
    return is_late;
  }
  const auto message = ShmMessage::decode(packet.bytes);
  if (message && message->kind == ShmMessage::Kind::kHello) {
    out.push_back({std::move(guest), *message});
  } else {
    refuse(
        guest,
        who + " sent what is not from libfsdp to '@" + name_ +
            "'. Give the job another name.");
  }
  return true;
}

void ShmLobby::refuse(Guest& guest, const std::string& reason) {
  last_refusal_ = reason;
  const ShmMessage answer{.kind = ShmMessage::Kind::kRefused, .text = reason};
  guest.socket.send(answer.encode(), {});
}

void ShmLobby::close(const std::string& reason) {
  accept_guests();
  for (Guest& guest : guests_) {
    refuse(guest, reason);
  }
  guests_.clear();
  listener_.stop_listening();
}

void ShmLobby::add_entries(std::vector<pollfd>& entries) const {
  entries.push_back({listener_.descriptor(), POLLIN, 0});
  for (const Guest& guest : guests_) {
    entries.push_back({guest.socket.descriptor(), POLLIN, 0});
  }
}

} // namespace fsdp::detail
