// How ranks meet, and what they say when one of them does not come.

#include "comm/shm_message.h"
#include "comm/shm_rendezvous.h"
#include "comm/shm_segment.h"
#include "comm/unix_socket.h"

#include "shm_peer_program.h"
#include "thread_world.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <fstream>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <thread>

namespace fsdp::detail {
namespace {

using namespace std::chrono_literals;

constexpr auto kLong = std::chrono::milliseconds(20s);
constexpr uint64_t kBytes = uint64_t{1} << 21;
const std::string kEnded =
    " ended before all ranks had joined. Look for its error.";

const std::string kWhatToDo =
    "'. Look for their errors; start all ranks of this host by one user with "
    "the same job name and size, or raise the time limit.";

std::string socket_name() {
  return shm_socket_name(::geteuid(), shm_test_job());
}

/// The error of a rank that joins in a thread of its own.
class JoiningRank {
 public:
  JoiningRank(int rank, int size, std::chrono::milliseconds timeout = kLong)
      : error_(std::async(std::launch::async, [=] {
          return error_of([&] {
            ShmSegment::join({shm_test_job(), rank, size, timeout, kBytes});
          });
        })) {}

  std::string error() { return error_.get(); }
  bool is_joining() const {
    return error_.wait_for(0s) != std::future_status::ready;
  }

 private:
  std::future<std::string> error_;
};

/// Speaks to rank 0 byte by byte.
class RawRank {
 public:
  RawRank() {
    std::optional<UnixSocket> socket;
    for (int i = 0; i < 20'000 && !socket; ++i) {
      socket = UnixSocket::connect(socket_name());
      std::this_thread::sleep_for(1ms);
    }
    socket_ = std::move(socket.value());
  }

  void say(const ShmMessage& message) { say_bytes(message.encode()); }
  void say_bytes(const std::string& bytes) { socket_->send(bytes, {}); }

  /// The next message; one of kind kGaveUp when rank 0 has closed its end, or
  /// says nothing for long.
  ShmMessage answer() {
    pollfd entry{socket_->descriptor(), POLLIN, 0};
    ::poll(&entry, 1, static_cast<int>(kLong.count()));
    Packet packet;
    if (socket_->receive(packet) == UnixSocket::ReceiveResult::kPacket) {
      return ShmMessage::decode(packet.bytes).value();
    }
    return {.kind = ShmMessage::Kind::kGaveUp};
  }

  /// What rank 0 answers to a hello that it refuses.
  std::string refusal(const ShmMessage& hello) {
    say(hello);
    const ShmMessage message = answer();
    EXPECT_EQ(message.kind, ShmMessage::Kind::kRefused);
    return message.text;
  }

 private:
  std::optional<UnixSocket> socket_;
};

/// A text with its "waited 0.3 s" made "waited T s", since a busy machine takes
/// longer.
std::string without_time(std::string text) {
  for (const std::string word : {"waited ", "for "}) {
    const size_t begin = text.find(word) + word.size();
    const size_t end = text.find_first_not_of("0123456789.", begin);
    if (text.find(word) != std::string::npos && end > begin) {
      text.replace(begin, end - begin, "T");
    }
  }
  return text;
}

/// Until so many processes and threads have connected to rank 0.
void await_connections(int count) {
  for (int i = 0; i < 20'000; ++i) {
    std::ifstream sockets("/proc/net/unix");
    int found = -1; // the one that listens
    for (std::string line; std::getline(sockets, line);) {
      found += contains(line, socket_name());
    }
    if (found >= count) {
      return;
    }
    std::this_thread::sleep_for(1ms);
  }
  ADD_FAILURE() << "not " << count << " connections";
}

/// The command that lets a peer say hello as a rank of this user's job.
std::string hello_command(int rank, int size) {
  return "hello " + std::to_string(::geteuid()) + " " + shm_test_job() + " " +
      std::to_string(rank) + " " + std::to_string(size);
}

std::string own_pid() {
  return "pid " + std::to_string(::getpid());
}

TEST(ShmStart, NamesTheRanksThatDoNotCome) {
  JoiningRank zero(0, 5, 1s);
  JoiningRank one(1, 5);
  JoiningRank three(3, 5);
  const std::string error = zero.error();
  EXPECT_EQ(
      without_time(error),
      "start-up: ranks that have not joined: 2, 4 (of 5), waited T s at '@" +
          socket_name() + kWhatToDo);
  EXPECT_EQ(one.error(), error);
  EXPECT_EQ(three.error(), error);
}

TEST(ShmStart, NamesThemToARankThatWaitsNoLonger) {
  JoiningRank zero(0, 3);
  JoiningRank one(1, 3, 300ms);
  const std::string error = one.error();
  EXPECT_EQ(
      without_time(error),
      "start-up: ranks that have not joined: 2 (of 3), waited T s by rank 1/3 "
      "at "
      "'@" +
          socket_name() + kWhatToDo);
  EXPECT_EQ(zero.error(), error);
}

TEST(ShmStart, SaysThatThereIsNoRank0) {
  EXPECT_EQ(
      without_time(JoiningRank(1, 3, 200ms).error()),
      "start-up: rank 1/3 found no rank 0 at '@" + socket_name() +
          "' on this host, waited T s. Start rank 0 on the same host, in the "
          "same network namespace (container), by the same user and with the "
          "same job name, or raise the time limit.");
}

TEST(ShmStart, TakesRanksInAnyOrder) {
  JoiningRank two(2, 3);
  JoiningRank one(1, 3);
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(JoiningRank(0, 3).error(), "no error");
  EXPECT_EQ(one.error(), "no error");
  EXPECT_EQ(two.error(), "no error");
}

TEST(ShmStart, RefusesAnotherWorldSize) {
  JoiningRank zero(0, 3);
  const std::string error = JoiningRank(1, 4).error();
  EXPECT_EQ(
      error,
      "start-up: world sizes differ: rank 1 (" + own_pid() +
          ") is one of 4 ranks, but rank 0 one of 3. Start all with the same "
          "size.");
  const std::string missing = JoiningRank(2, 3, 200ms).error();
  EXPECT_EQ(zero.error(), missing);
  EXPECT_TRUE(contains(missing, "not joined: 1 (of 3)")) << missing;
  EXPECT_TRUE(contains(missing, " Refused: " + error)) << missing;
}

TEST(ShmStart, RefusesASecondProcessOfARank) {
  JoiningRank zero(0, 3);
  RawRank one;
  one.say({.rank = 1, .size = 3, .bytes = kBytes});
  const std::string start = "start-up: two processes have rank ";
  const std::string end = ": " + own_pid() + " and " + own_pid() +
      ". Start each rank once; if the job runs twice, give each its own name.";
  EXPECT_EQ(JoiningRank(1, 3).error(), start + "1" + end);
  EXPECT_EQ(JoiningRank(0, 3).error(), start + "0" + end);
  EXPECT_TRUE(zero.is_joining());
  JoiningRank two(2, 3);
  EXPECT_EQ(one.answer().kind, ShmMessage::Kind::kMemory);
  one.say({.kind = ShmMessage::Kind::kReady});
  EXPECT_EQ(one.answer().kind, ShmMessage::Kind::kGo);
  EXPECT_EQ(two.error(), "no error");
  EXPECT_EQ(zero.error(), "no error");
}

TEST(ShmStart, RefusesWhatItDoesNotUnderstand) {
  JoiningRank zero(0, 2);
  EXPECT_EQ(
      RawRank().refusal({.version = 2, .rank = 1, .size = 2}),
      "start-up: " + own_pid() +
          " speaks version 2 of the protocol, but rank 0 version 1. Link all "
          "ranks with the same version of libfsdp.");
  EXPECT_EQ(
      RawRank().refusal({.rank = 2, .size = 2}),
      "start-up: rank 2 (" + own_pid() + ") is not one of ranks 0 to 1.");
  EXPECT_EQ(
      RawRank().refusal({.rank = -1, .size = 2}),
      "start-up: rank -1 (" + own_pid() + ") is not one of ranks 0 to 1.");
  const std::string foreign = "start-up: " + own_pid() +
      " sent what is not from libfsdp to '@" + socket_name() +
      "'. Give the job another name.";
  EXPECT_EQ(RawRank().refusal({.kind = ShmMessage::Kind::kGo}), foreign);
  for (const std::string bytes :
       {"GET / HTTP/1.1", "a text of 32 bytes or more than that"}) {
    RawRank stranger;
    stranger.say_bytes(bytes);
    EXPECT_EQ(stranger.answer().text, foreign);
  }
  EXPECT_TRUE(zero.is_joining());
  EXPECT_EQ(JoiningRank(1, 2).error(), "no error");
  EXPECT_EQ(zero.error(), "no error");
}

TEST(ShmStart, IsNotHeldUpByWhoSaysNothing) {
  JoiningRank zero(0, 2);
  RawRank silent;
  RawRank gone; // has left before it is greeted
  gone = RawRank();
  EXPECT_EQ(JoiningRank(1, 2).error(), "no error");
  EXPECT_EQ(zero.error(), "no error");
  EXPECT_EQ(
      silent.answer().text,
      "start-up: all 2 ranks of '@" + socket_name() +
          "' have joined, this process is one too many. If the job runs twice, "
          "give each its own name.");
}

TEST(ShmStart, RefusesWhoSaysNothingForLong) {
  JoiningRank zero(0, 2);
  EXPECT_EQ(
      without_time(RawRank().answer().text),
      "start-up: " + own_pid() + " connected to '@" + socket_name() +
          "', but said nothing for T s. Start it again.");
  EXPECT_EQ(JoiningRank(1, 2).error(), "no error");
  EXPECT_EQ(zero.error(), "no error");
}

TEST(ShmStart, NamesARankThatIsKilledAtOnce) {
  JoiningRank zero(0, 4);
  JoiningRank one(1, 4);
  await_connections(1);
  ShmPeer two;
  ASSERT_EQ(two.ask(hello_command(2, 4)), "ok");
  two.kill(SIGKILL);
  const std::string error = zero.error();
  EXPECT_EQ(
      error,
      "start-up: rank 2/4 (pid " + std::to_string(two.pid()) + ")" + kEnded);
  EXPECT_EQ(one.error(), error);
}

// Its end is not seen at the socket, which another process keeps open.
TEST(ShmStart, NamesARankThatIsKilledAndHasAChild) {
  JoiningRank zero(0, 3);
  ShmPeer two;
  ASSERT_EQ(two.ask(hello_command(2, 3)), "ok");
  const std::string child = two.ask("clone");
  ASSERT_EQ(child.rfind("ok ", 0), 0u);
  two.kill(SIGKILL);
  EXPECT_EQ(
      zero.error(),
      "start-up: rank 2/3 (pid " + std::to_string(two.pid()) + ")" + kEnded);
  ::kill(std::stoi(child.substr(3)), SIGKILL);
}

TEST(ShmStart, NamesRank0WhenItIsKilledAndHasAChild) {
  ShmPeer zero;
  ASSERT_EQ(
      zero.ask("listen " + std::to_string(::geteuid()) + " " + shm_test_job()),
      "ok");
  const std::string child = zero.ask("clone");
  ASSERT_EQ(child.rfind("ok ", 0), 0u);
  JoiningRank one(1, 3);
  await_connections(1);
  zero.kill(SIGKILL);
  EXPECT_EQ(
      one.error(),
      "start-up: rank 0/3 (pid " + std::to_string(zero.pid()) + ")" + kEnded);
  ::kill(std::stoi(child.substr(3)), SIGKILL);
}

TEST(ShmStart, NamesARankThatLeaves) {
  JoiningRank zero(0, 4);
  JoiningRank one(1, 4);
  await_connections(1);
  RawRank().say({.rank = 2, .size = 4});
  const std::string error = zero.error();
  EXPECT_EQ(error, "start-up: rank 2/4 (" + own_pid() + ")" + kEnded);
  EXPECT_EQ(one.error(), error);
}

TEST(ShmStart, NamesARankThatLeavesAfterAllHaveJoined) {
  JoiningRank zero(0, 3);
  JoiningRank one(1, 3);
  {
    RawRank two;
    two.say({.rank = 2, .size = 3, .bytes = kBytes});
    EXPECT_EQ(two.answer().kind, ShmMessage::Kind::kMemory);
  }
  const std::string error = zero.error();
  EXPECT_EQ(error, "start-up: rank 2/3 (" + own_pid() + ")" + kEnded);
  EXPECT_EQ(one.error(), error);
}

TEST(ShmStart, TellsAllWhyARankFailed) {
  JoiningRank zero(0, 3);
  JoiningRank one(1, 3);
  RawRank two;
  two.say({.rank = 2, .size = 3, .bytes = kBytes});
  EXPECT_EQ(two.answer().kind, ShmMessage::Kind::kMemory);
  two.say({.kind = ShmMessage::Kind::kFailed, .text = "no room here."});
  const std::string error = zero.error();
  EXPECT_EQ(
      error, "start-up: rank 2/3 (" + own_pid() + ") failed: no room here.");
  EXPECT_EQ(one.error(), error);
  EXPECT_EQ(two.answer().text, error);
}

TEST(ShmStart, TellsAllWhatTheSystemDoesNotAllowARank) {
  JoiningRank zero(0, 3);
  JoiningRank one(1, 3);
  ShmPeer two;
  ASSERT_EQ(two.ask("deny dontfork"), "ok");
  EXPECT_EQ(
      two.ask(join_command(2, 3)),
      "error shared memory: madvise(MADV_DONTFORK) failed: Invalid argument");
  const std::string error = zero.error();
  EXPECT_EQ(
      error,
      "start-up: rank 2/3 (pid " + std::to_string(two.pid()) +
          ") failed: shared memory: madvise(MADV_DONTFORK) failed: Invalid "
          "argument");
  EXPECT_EQ(one.error(), error);
}

TEST(ShmStart, NamesARankThatDoesNotTakeTheMemory) {
  JoiningRank zero(0, 3, 1s);
  JoiningRank one(1, 3);
  RawRank two;
  two.say({.rank = 2, .size = 3, .bytes = kBytes});
  const std::string error = zero.error();
  EXPECT_EQ(
      without_time(error),
      "start-up: ranks that have not taken the memory: 2 (" + own_pid() +
          ") (of 3), waited T s at '@" + socket_name() + kWhatToDo);
  EXPECT_EQ(one.error(), error);
}

TEST(ShmStart, NamesRank0WhenItIsKilled) {
  ShmPeer zero;
  zero.tell(join_command(0, 3));
  JoiningRank one(1, 3);
  await_connections(1);
  zero.kill(SIGKILL);
  EXPECT_EQ(
      one.error(),
      "start-up: rank 0/3 (pid " + std::to_string(zero.pid()) + ")" + kEnded);
}

TEST(ShmStart, NamesRank0WhenItDoesNotAnswer) {
  ShmPeer zero;
  zero.tell(join_command(0, 3));
  RawRank two; // so rank 0 is there
  zero.kill(SIGSTOP);
  const std::string error = JoiningRank(1, 3, 100ms).error();
  zero.kill(SIGCONT);
  EXPECT_EQ(
      without_time(error),
      "start-up: rank 0/3 (pid " + std::to_string(zero.pid()) +
          ", stopped) does not answer, waited T s. Look at what it does.");
}

TEST(ShmStart, RefusesAnotherUser) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "only root can become another user";
  }
  ShmPeer stranger;
  ASSERT_EQ(stranger.ask("become_user 65534"), "ok");
  JoiningRank zero(0, 2);
  ASSERT_EQ(stranger.ask("hello 0 " + shm_test_job() + " 1 2"), "ok");
  EXPECT_EQ(
      stranger.ask("answer"),
      "ok start-up: pid " + std::to_string(stranger.pid()) +
          " belongs to user 65534, but rank 0 to user 0. Start all ranks as "
          "one user.");
  EXPECT_EQ(JoiningRank(1, 2).error(), "no error");
  EXPECT_EQ(zero.error(), "no error");
}

TEST(ShmStart, JoinsNoRank0OfAnotherUser) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "only root can become another user";
  }
  ShmPeer stranger;
  ASSERT_EQ(stranger.ask("become_user 65534"), "ok");
  ASSERT_EQ(stranger.ask("listen 0 " + shm_test_job()), "ok");
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(
        JoiningRank(rank, 2).error(),
        "start-up: who answers rank " + std::to_string(rank) +
            "/2 as rank 0 (pid " + std::to_string(stranger.pid()) +
            ") belongs to user 65534, but this process to user 0. Start all "
            "ranks as one user, or give the job another name.");
  }
}

TEST(ShmStart, SaysWhatTheSystemDoesNotAllow) {
  const std::pair<const char*, const char*> calls[] = {
      {"memfd_create", "memfd_create failed: Operation not permitted"},
      {"socket", "socket(AF_UNIX) failed: Permission denied"},
      {"pidfd_open", " failed: Function not implemented"}};
  for (const auto& [call, text] : calls) {
    ShmPeer zero;
    ASSERT_EQ(zero.ask(std::string("deny ") + call), "ok");
    const std::string error = zero.ask(join_command(0, 1));
    EXPECT_EQ(error.find("error shared memory: "), 0u) << error;
    EXPECT_TRUE(contains(error, text)) << error;
  }
}

TEST(ShmStart, TellsAllWhatTheSystemDoesNotAllowRank0) {
  ShmPeer zero;
  ASSERT_EQ(zero.ask("deny memfd_create"), "ok");
  zero.tell(join_command(0, 2));
  EXPECT_EQ(
      JoiningRank(1, 2).error(),
      "start-up: rank 0/2 (pid " + std::to_string(zero.pid()) +
          ") failed: shared memory: memfd_create failed: Operation not "
          "permitted");
}

TEST(ShmStart, SaysThatAnotherProcessHoldsTheName) {
  const std::string name = socket_name();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  name.copy(address.sun_path + 1, name.size());
  const int holder = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  const size_t length = offsetof(sockaddr_un, sun_path) + 1 + name.size();
  ASSERT_EQ(
      ::bind(
          holder,
          reinterpret_cast<const sockaddr*>(&address),
          static_cast<socklen_t>(length)),
      0);
  EXPECT_EQ(
      without_time(JoiningRank(0, 2, 100ms).error()),
      "start-up: rank 0/2 (" + own_pid() + ") cannot listen at '@" + name +
          "', which another process holds, waited T s. Give the job another "
          "name.");
  JoiningRank zero(0, 2);
  std::this_thread::sleep_for(20ms);
  ::close(holder);
  EXPECT_EQ(JoiningRank(1, 2).error(), "no error");
  EXPECT_EQ(zero.error(), "no error");
}

TEST(ShmSocketName, IsDifferentForUsersAndJobs) {
  EXPECT_EQ(shm_socket_name(1000, "job:29500"), "fsdp-1000-job:29500");
  const std::string job(200, 'a');
  const std::string name = shm_socket_name(1000, job);
  EXPECT_EQ(name.size(), 107u);
  EXPECT_EQ(shm_socket_name(1000, job), name);
  EXPECT_NE(shm_socket_name(1000, job + "b"), name);
  EXPECT_NE(shm_socket_name(1001, job), name);
}

} // namespace
} // namespace fsdp::detail
