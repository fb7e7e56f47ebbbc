#include "comm/shm_leader.h"

#include "comm/call.h"
#include "comm/shm_member.h"
#include "comm/shm_rendezvous.h"

#include <fsdp/communicator.h>

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

namespace fsdp::detail {
namespace {

using namespace std::chrono_literals;

// A failure whose text holds for all ranks.
class MeetingFailure : public CommunicationError {
 public:
  using CommunicationError::CommunicationError;
};

std::string_view bytes_of_pids(std::span<const int32_t> pids) {
  return {reinterpret_cast<const char*>(pids.data()), pids.size_bytes()};
}

} // namespace

ShmLeader::ShmLeader(const ShmAddress& address, ShmMemory& memory)
    : address_(address),
      memory_(memory),
      name_(shm_socket_name(::geteuid(), address.name)),
      deadline_(address.timeout),
      seats_(static_cast<size_t>(address.size)) {
}

std::vector<PeerProcess> ShmLeader::meet() {
  try {
    self_ = PeerProcess(::getpid(), open_process(::getpid()));
    open_lobby();
    gather();
    share_memory();
    await_ready();
  } catch (const MeetingFailure& e) {
    tell_all(e.what());
    throw;
  } catch (const std::exception& e) {
    tell_all(title_of(0) + " failed: " + e.what());
    throw;
  }
  say_go();
  std::vector<PeerProcess> processes;
  processes.push_back(std::move(self_));
  for (int rank = 1; rank < address_.size; ++rank) {
    processes.push_back(std::move(seat(rank).process));
  }
  return processes;
}

void ShmLeader::open_lobby() {
  while (!(lobby_ = ShmLobby::open(name_))) {
    if (auto other = UnixSocket::connect(name_)) {
      // There is another rank 0, whose answer to a second one says it all.
      ShmTalk talk(std::move(*other), address_, memory_.capacity(), deadline_);
      std::vector<FileDescriptor> none;
      talk.hear(ShmMessage::Kind::kRefused, none);
    }
    if (deadline_.passed()) {
      throw CommunicationError(
          title_of(0) + " cannot listen at '@" + name_ +
          "', which another process holds, waited " + deadline_.waited() +
          ". Give the job another name.");
    }
    std::this_thread::sleep_for(1ms);
  }
}

void ShmLeader::gather() {
  while (!all_joined()) {
    if (deadline_.passed()) {
      fail_for_time();
    }
    wait_for_news();
    for (auto& arrival : lobby_->arrivals()) {
      welcome(std::move(arrival));
    }
    hear_all();
  }
  for (auto& arrival : lobby_->arrivals()) {
    welcome(std::move(arrival)); // one too many: objects
  }
  lobby_->close(
      "start-up: all " + std::to_string(address_.size) + " ranks of '@" +
      name_ +
      "' have joined, this process is one too many. If the job runs "
      "twice, give each its own name.");
  lobby_.reset();
}

void ShmLeader::welcome(ShmLobby::Arrival arrival) {
  const std::string reason = objection(arrival);
  if (!reason.empty()) {
    lobby_->refuse(arrival.guest, reason);
    return;
  }
  const int rank = arrival.hello.rank;
  UnixSocket& socket = arrival.guest.socket;
  PeerProcess process(arrival.guest.who.pid, socket.peer_process());
  const bool is_gone = !process.handle();
  seats_[static_cast<size_t>(rank)] = Seat{
      std::move(socket),
      std::move(process),
      static_cast<size_t>(arrival.hello.bytes)};
  if (is_gone) {
    fail_for_end(rank);
  }
}

std::string ShmLeader::objection(const ShmLobby::Arrival& arrival) const {
  const ShmMessage& hello = arrival.hello;
  const std::string pid = pid_text(arrival.guest.who.pid);
  const std::string who =
      "rank " + std::to_string(hello.rank) + " (" + pid + ")";
  if (hello.version != ShmMessage::kVersion) {
    return "start-up: " + pid + " speaks version " +
        std::to_string(hello.version) +
        " of the protocol, but rank 0 version " +
        std::to_string(ShmMessage::kVersion) +
        ". Link all ranks with the same version of libfsdp.";
  }
  if (hello.size != address_.size) {
    return "start-up: world sizes differ: " + who + " is one of " +
        std::to_string(hello.size) + " ranks, but rank 0 one of " +
        std::to_string(address_.size) + ". Start all with the same size.";
  }
  if (hello.rank < 0 || hello.rank >= address_.size) {
    return "start-up: " + who + " is not one of ranks 0 to " +
        std::to_string(address_.size - 1) + ".";
  }
  const auto& seat = seats_[static_cast<size_t>(hello.rank)];
  if (hello.rank == 0 || seat) {
    const pid_t first = seat ? seat->process.pid() : self_.pid();
    return "start-up: two processes have rank " + std::to_string(hello.rank) +
        ": " + pid_text(first) + " and " + pid +
        ". Start each rank once; if the job runs twice, give each its own "
        "name.";
  }
  return {};
}

void ShmLeader::hear_all() {
  for (int rank = 1; rank < address_.size; ++rank) {
    if (seats_[static_cast<size_t>(rank)]) {
      hear(rank, seat(rank));
    }
  }
}

void ShmLeader::hear(int rank, Seat& seat) {
  // Asked first, since what it said before it ended is read below.
  const bool has_ended = seat.process.ended();
  Packet packet;
  const auto result = seat.socket.receive(packet);
  if (result == UnixSocket::ReceiveResult::kNothing && !has_ended) {
    return;
  }
  if (result != UnixSocket::ReceiveResult::kPacket) {
    fail_for_end(rank);
  }
  const auto message = ShmMessage::decode(packet.bytes);
  const auto kind = message ? message->kind : ShmMessage::Kind::kHello;
  if (kind == ShmMessage::Kind::kReady) {
    seat.ready = true;
  } else if (kind == ShmMessage::Kind::kGaveUp) {
    fail_for_time(" by " + rank_text(rank, address_.size));
  } else if (kind == ShmMessage::Kind::kFailed) {
    throw MeetingFailure(title_of(rank) + " failed: " + message->text);
  } else {
    throw MeetingFailure(
        title_of(rank) +
        " sent what rank 0 does not expect. Link all ranks "
        "with the same version of libfsdp.");
  }
}

void ShmLeader::share_memory() {
  size_t bytes = memory_.capacity();
  for (int rank = 1; rank < address_.size; ++rank) {
    bytes = std::min(bytes, seat(rank).capacity);
  }
  memory_.create(bytes);
  // Handles of the processes travel too: a pid may be another one's later, and
  // means nothing in another pid namespace.
  std::vector<int> descriptors{
      memory_.descriptor().get(), self_.handle().get()};
  std::vector<int32_t> pids{0, self_.pid()};
  for (int rank = 1; rank < address_.size; ++rank) {
    descriptors.push_back(seat(rank).process.handle().get());
    pids.push_back(seat(rank).process.pid());
  }
  for (int rank = 1; rank < address_.size; ++rank) {
    send_memory(rank, bytes, descriptors, pids);
  }
}

void ShmLeader::send_memory(
    int rank,
    size_t bytes,
    const std::vector<int>& descriptors,
    const std::vector<int32_t>& pids) {
  for (size_t i = 0; i < pids.size(); i += UnixSocket::kMostDescriptors) {
    const size_t count =
        std::min(UnixSocket::kMostDescriptors, pids.size() - i);
    const ShmMessage part{
        .kind = ShmMessage::Kind::kMemory,
        .bytes = bytes,
        .text = std::string(bytes_of_pids({pids.data() + i, count}))};
    if (!send(seat(rank), part, {descriptors.data() + i, count})) {
      hear(rank, seat(rank)); // why it has closed its end
      deadline_.passed() ? fail_for_time() : fail_for_end(rank);
    }
  }
}

void ShmLeader::await_ready() {
  hear_all();
  while (!all_ready()) {
    if (deadline_.passed()) {
      fail_for_time();
    }
    wait_for_news();
    hear_all();
  }
}

void ShmLeader::say_go() {
  // Who has ended since is no failure of the start-up: the others see it when
  // they wait for it.
  for (int rank = 1; rank < address_.size; ++rank) {
    send(seat(rank), {.kind = ShmMessage::Kind::kGo}, {});
  }
}

void ShmLeader::tell_all(const std::string& failure) {
  const ShmMessage message{.kind = ShmMessage::Kind::kFailed, .text = failure};
  for (auto& seat : seats_) {
    if (seat) {
      seat->socket.send(message.encode(), {});
    }
  }
  if (lobby_) {
    lobby_->close(failure);
  }
}

void ShmLeader::wait_for_news() const {
  std::vector<pollfd> entries;
  if (lobby_) {
    lobby_->add_entries(entries);
  }
  for (const auto& seat : seats_) {
    if (seat) {
      entries.push_back({seat->socket.descriptor(), POLLIN, 0});
      entries.push_back({seat->process.handle().get(), POLLIN, 0});
    }
  }
  const bool has_guests = lobby_ && lobby_->has_guests();
  const auto limit = deadline_.left(has_guests ? 100ms : 10'000ms);
  ::poll(entries.data(), entries.size(), static_cast<int>(limit.count()));
}

bool ShmLeader::send(
    Seat& seat,
    const ShmMessage& message,
    std::span<const int> fds) {
  const std::string bytes = message.encode();
  auto result = seat.socket.send(bytes, fds);
  while (result == UnixSocket::SendResult::kBusy && !deadline_.passed()) {
    std::this_thread::sleep_for(1ms);
    result = seat.socket.send(bytes, fds);
  }
  return result == UnixSocket::SendResult::kSent;
}

bool ShmLeader::all_joined() const {
  return std::all_of(seats_.begin() + 1, seats_.end(), [](const auto& seat) {
    return seat.has_value();
  });
}

bool ShmLeader::all_ready() const {
  return std::all_of(seats_.begin() + 1, seats_.end(), [](const auto& seat) {
    return seat && seat->ready;
  });
}

ShmLeader::Seat& ShmLeader::seat(int rank) {
  return *seats_[static_cast<size_t>(rank)];
}

std::string ShmLeader::title_of(int rank) {
  const PeerProcess& process = rank == 0 ? self_ : seat(rank).process;
  return "start-up: " + rank_text(rank, address_.size) + " (" +
      pid_text(process.pid()) + ")";
}

void ShmLeader::fail_for_end(int rank) {
  throw MeetingFailure(
      title_of(rank) +
      " ended before all ranks had joined. Look for its error.");
}

void ShmLeader::fail_for_time(const std::string& by_whom) {
  const bool have_joined = all_joined();
  std::string missing;
  for (int rank = 1; rank < address_.size; ++rank) {
    const auto& seat = seats_[static_cast<size_t>(rank)];
    if (!seat || (have_joined && !seat->ready)) {
      missing += (missing.empty() ? "" : ", ") + std::to_string(rank) +
          (seat ? " (" + seat->process.text() + ")" : "");
    }
  }
  const std::string refusal = lobby_ ? lobby_->last_refusal() : std::string();
  throw MeetingFailure(
      "start-up: ranks that have not " +
      std::string(have_joined ? "taken the memory: " : "joined: ") + missing +
      " (of " + std::to_string(address_.size) + "), waited " +
      deadline_.waited() + by_whom + " at '@" + name_ +
      "'. Look for their errors; start all ranks of this host by one user with "
      "the same job name and size, or raise the time limit." +
      (refusal.empty() ? "" : " Refused: " + refusal));
}

} // namespace fsdp::detail
