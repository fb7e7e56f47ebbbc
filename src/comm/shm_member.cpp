#include "comm/shm_member.h"

#include "comm/call.h"
#include "comm/shm_rendezvous.h"

#include <fsdp/communicator.h>

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

namespace fsdp::detail {
namespace {

using namespace std::chrono_literals;

// How long rank 0 may take to say which ranks are missing.
constexpr auto kLastAnswer = 2s;

} // namespace

ShmTalk::ShmTalk(
    UnixSocket socket,
    const ShmAddress& address,
    size_t capacity,
    const Deadline& deadline)
    : socket_(std::move(socket)),
      deadline_(deadline) {
  const PeerCredentials who = socket_.peer_credentials();
  title_ = "start-up: " + rank_text(0, address.size);
  if (who.uid != ::geteuid()) {
    throw CommunicationError(
        "start-up: who answers " + rank_text(address.rank, address.size) +
        " as rank 0 (" + pid_text(who.pid) + ") belongs to user " +
        std::to_string(who.uid) + ", but this process to user " +
        std::to_string(::geteuid()) +
        ". Start all ranks as one user, or give the job another name.");
  }
  leader_ = PeerProcess(who.pid, socket_.peer_process());
  say(
      {.kind = ShmMessage::Kind::kHello,
       .rank = address.rank,
       .size = address.size,
       .bytes = capacity});
}

void ShmTalk::say(const ShmMessage& message) {
  const std::string bytes = message.encode();
  // When rank 0 has closed its end, hear() finds out why.
  while (socket_.send(bytes, {}) == UnixSocket::SendResult::kBusy &&
         !deadline_.passed()) {
    std::this_thread::sleep_for(1ms);
  }
}

bool ShmTalk::wait(const Deadline& deadline, Packet& packet) {
  while (true) {
    const bool has_ended = leader_.ended();
    const auto result = socket_.receive(packet);
    if (result == UnixSocket::ReceiveResult::kPacket) {
      return true;
    }
    if (has_ended || result == UnixSocket::ReceiveResult::kClosed) {
      throw CommunicationError(
          title_ + " (" + pid_text(leader_.pid()) +
          ") ended before all ranks had joined. Look for its error.");
    }
    if (deadline.passed()) {
      return false;
    }
    pollfd entries[] = {
        {socket_.descriptor(), POLLIN, 0}, {leader_.handle().get(), POLLIN, 0}};
    ::poll(entries, 2, static_cast<int>(deadline.left(1s).count()));
  }
}

ShmMessage ShmTalk::hear(
    ShmMessage::Kind kind,
    std::vector<FileDescriptor>& out) {
  Packet packet;
  if (!wait(deadline_, packet)) {
    say({.kind = ShmMessage::Kind::kGaveUp});
    if (!wait(Deadline(kLastAnswer), packet)) {
      throw CommunicationError(
          title_ + " (" + leader_.text() + ") does not answer, waited " +
          deadline_.waited() + ". Look at what it does.");
    }
  }
  const auto message = ShmMessage::decode(packet.bytes);
  if (!message) {
    throw CommunicationError(
        title_ + " (" + pid_text(leader_.pid()) +
        ") is not a process of libfsdp. Give the job another name.");
  }
  if (message->kind == ShmMessage::Kind::kRefused ||
      message->kind == ShmMessage::Kind::kFailed) {
    throw CommunicationError(message->text);
  }
  if (message->kind != kind) {
    throw CommunicationError(
        title_ + " sent message " +
        std::to_string(static_cast<uint32_t>(message->kind)) +
        ", but expected was " + std::to_string(static_cast<uint32_t>(kind)) +
        ". Link all ranks with the same version of libfsdp.");
  }
  std::move(
      packet.descriptors.begin(),
      packet.descriptors.end(),
      std::back_inserter(out));
  return *message;
}

ShmMember::ShmMember(const ShmAddress& address, ShmMemory& memory)
    : address_(address),
      memory_(memory),
      deadline_(address.timeout) {
}

std::vector<PeerProcess> ShmMember::meet() {
  ShmTalk talk(connect(), address_, memory_.capacity(), deadline_);
  std::vector<PeerProcess> processes;
  try {
    processes = take_memory(talk);
  } catch (const std::exception& e) {
    talk.say({.kind = ShmMessage::Kind::kFailed, .text = e.what()});
    throw;
  }
  talk.say({.kind = ShmMessage::Kind::kReady});
  std::vector<FileDescriptor> none;
  talk.hear(ShmMessage::Kind::kGo, none);
  return processes;
}

UnixSocket ShmMember::connect() const {
  const std::string name = shm_socket_name(::geteuid(), address_.name);
  for (auto pause = 1ms; true; pause = std::min(pause * 2, 16ms)) {
    if (auto socket = UnixSocket::connect(name)) {
      return std::move(*socket);
    }
    if (deadline_.passed()) {
      throw CommunicationError(
          "start-up: " + rank_text(address_.rank, address_.size) +
          " found no rank 0 at '@" + name + "' on this host, waited " +
          deadline_.waited() +
          ". Start rank 0 on the same host, in the same network namespace "
          "(container), by the same user and with the same job name, or raise "
          "the time limit.");
    }
    std::this_thread::sleep_for(std::min(pause, deadline_.left(pause) + 1ms));
  }
}

std::vector<PeerProcess> ShmMember::take_memory(ShmTalk& talk) {
  const auto count = static_cast<size_t>(address_.size) + 1;
  std::vector<FileDescriptor> descriptors; // the memory, then the processes
  std::string pids;
  size_t bytes = 0;
  while (descriptors.size() < count) {
    const ShmMessage part = talk.hear(ShmMessage::Kind::kMemory, descriptors);
    pids += part.text;
    bytes = part.bytes;
    if (pids.size() != descriptors.size() * sizeof(int32_t)) {
      throw CommunicationError(
          "start-up: " + rank_text(address_.rank, address_.size) + " got " +
          std::to_string(descriptors.size()) + " descriptors, but expected " +
          std::to_string(pids.size() / sizeof(int32_t)) + ".");
    }
  }
  memory_.adopt(std::move(descriptors[0]), bytes);
  std::vector<PeerProcess> processes;
  for (size_t i = 1; i < count; ++i) {
    int32_t pid = 0;
    std::memcpy(&pid, pids.data() + i * sizeof pid, sizeof pid);
    processes.emplace_back(pid, std::move(descriptors[i]));
  }
  return processes;
}

} // namespace fsdp::detail
