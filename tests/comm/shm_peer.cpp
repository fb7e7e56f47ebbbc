// A rank as a process of its own. It obeys one command a line and answers each
// with a line: "ok ..." or "error TEXT". See ShmPeer in shm_peer_program.h.

#include "comm/shm_memory.h"
#include "comm/shm_message.h"
#include "comm/shm_rendezvous.h"
#include "comm/shm_segment.h"
#include "comm/unix_socket.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace fsdp::detail {
namespace {

constexpr unsigned kLongestLife = 120; // seconds, whatever becomes of the test

// Makes a system call fail with `error` where its 64-bit argument number
// `argument` is at least `from`.
void deny(unsigned call, unsigned argument, uint32_t from, uint16_t error) {
  const auto low = static_cast<uint32_t>(
      offsetof(seccomp_data, args) + argument * sizeof(uint64_t));
  const sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, low),
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, from, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, uint32_t{SECCOMP_RET_ERRNO} | error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program{
      sizeof code / sizeof code[0], const_cast<sock_filter*>(code)};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    throw std::runtime_error("seccomp is not possible here");
  }
}

void lower_limit(decltype(RLIMIT_AS) which, rlim_t bytes) {
  const rlimit limit{bytes, bytes};
  if (::setrlimit(which, &limit) != 0) {
    throw std::runtime_error("setrlimit failed");
  }
}

rlim_t address_space_in_use() {
  std::ifstream file("/proc/self/statm");
  rlim_t pages = 0;
  file >> pages;
  return pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE));
}

class PeerCommands {
 public:
  std::string obey(const std::string& line) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    return commands_.at(name)(words);
  }

 private:
  using Words = std::istringstream;

  template <class T>
  static T next(Words& words) {
    T value{};
    if (!(words >> value)) {
      throw std::invalid_argument("a word is missing in: " + words.str());
    }
    return value;
  }

  // join NAME RANK SIZE MILLISECONDS BYTES
  std::string join(Words& words) {
    ShmAddress address;
    address.name = next<std::string>(words);
    address.rank = next<int>(words);
    address.size = next<int>(words);
    address.timeout = std::chrono::milliseconds(next<int>(words));
    address.bytes = next<size_t>(words);
    segment_ = ShmSegment::join(address);
    return std::to_string(segment_->bytes());
  }

  // threads SIZE BYTES
  std::string threads(Words& words) {
    const int size = next<int>(words);
    segment_ = ShmSegment::for_threads(size, next<size_t>(words))[0];
    return {};
  }

  // write OFFSET TEXT
  std::string write(Words& words) {
    const auto offset = next<size_t>(words);
    const auto text = next<std::string>(words);
    std::memcpy(segment_->data() + offset, text.c_str(), text.size() + 1);
    return {};
  }

  // read OFFSET
  std::string read(Words& words) {
    return reinterpret_cast<const char*>(
        segment_->read_only_data() + next<size_t>(words));
  }

  // Without the handler of a sanitizer, which would exit instead.
  std::string write_read_only(Words&) {
    std::signal(SIGSEGV, SIG_DFL);
    *const_cast<volatile std::byte*>(segment_->read_only_data()) = std::byte{1};
    return {};
  }

  // reserve OFFSET BYTES
  std::string reserve(Words& words) {
    const auto offset = next<size_t>(words);
    segment_->reserve(offset, next<size_t>(words));
    return {};
  }

  // reserve_alone KEPT BYTES: data up to KEPT is there before; prints how much
  // memory is taken before and after, where the first hole in the data is then,
  // whether what was there stayed, and the failure.
  std::string reserve_alone(Words& words) {
    const auto kept = next<size_t>(words);
    const auto bytes = next<size_t>(words);
    ShmMemory memory("rank 0/1", bytes);
    memory.create(bytes);
    std::memset(memory.data(), 7, kept);
    const auto taken = [&memory] {
      struct stat status {};
      ::fstat(memory.descriptor().get(), &status);
      return std::to_string(status.st_blocks * 512);
    };
    std::string result = taken();
    std::string failure = "no failure";
    try {
      memory.reserve(0, bytes);
    } catch (const std::exception& e) {
      failure = e.what();
    }
    const auto hole = ::lseek(memory.descriptor().get(), 0, SEEK_HOLE);
    result += " " + taken() + " " + std::to_string(hole);
    const auto* data = reinterpret_cast<const char*>(memory.read_only_data());
    const bool stayed = std::string(data, kept) == std::string(kept, '\7');
    return result + (stayed ? " stayed " : " lost ") + failure;
  }

  std::string describe(Words& words) {
    return segment_->describe(next<int>(words));
  }

  std::string is_dead(Words& words) {
    return segment_->is_dead(next<int>(words)) ? "yes" : "no";
  }

  // The child takes over the conversation; the parent waits to be killed.
  std::string fork(Words&) {
    const pid_t child = ::fork();
    if (child != 0) {
      while (true) {
        ::pause();
      }
    }
    ::alarm(kLongestLife);
    return std::to_string(::getpid());
  }

  // A child that holds all descriptors, since the library does not hear of it.
  std::string clone(Words&) {
    const auto child = ::syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0) {
      ::alarm(kLongestLife);
      while (true) {
        ::pause();
      }
    }
    return std::to_string(child);
  }

  // Memory of its own where a forked child does not have the segment.
  std::string occupy(Words&) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    own_page_ =
        ::mmap(segment_->data(), 4096, PROT_READ | PROT_WRITE, flags, -1, 0);
    return own_page_ == segment_->data() ? "" : "taken";
  }

  std::string write_own_page(Words&) {
    *static_cast<volatile char*>(own_page_) = 1;
    return {};
  }

  std::string forked(Words&) { return segment_->forked() ? "yes" : "no"; }

  std::string leave(Words&) {
    segment_.reset();
    return {};
  }

  // limit_addresses BYTES: how much more than now
  std::string limit_addresses(Words& words) {
    lower_limit(RLIMIT_AS, address_space_in_use() + next<rlim_t>(words));
    return {};
  }

  std::string limit_files(Words& words) {
    lower_limit(RLIMIT_FSIZE, next<rlim_t>(words));
    return {};
  }

  // deny WHAT
  std::string deny_call(Words& words) {
    const auto what = next<std::string>(words);
    if (what == "memfd_create") {
      deny(SYS_memfd_create, 0, 0, EPERM);
    } else if (what == "socket") {
      deny(SYS_socket, 0, 0, EACCES);
    } else if (what == "pidfd_open") {
      deny(SYS_pidfd_open, 0, 0, ENOSYS);
    } else if (what == "populate") {
      deny(SYS_madvise, 2, 23, EINVAL); // MADV_POPULATE_WRITE
    } else if (what == "dontfork") {
      deny(SYS_madvise, 2, MADV_DONTFORK, EINVAL);
    } else if (what == "fallocate_from_48_MiB") {
      deny(SYS_fallocate, 2, 48 << 20, ENOSPC);
    } else {
      throw std::invalid_argument("nothing to deny: " + what);
    }
    return {};
  }

  std::string become_user(Words& words) {
    if (::setuid(next<uid_t>(words)) != 0) {
      throw std::runtime_error("setuid failed");
    }
    return {};
  }

  // listen USER NAME: at the address of another user's job
  std::string listen(Words& words) {
    const auto user = next<uid_t>(words);
    listener_ =
        UnixSocket::listen(shm_socket_name(user, next<std::string>(words)));
    return listener_ ? "" : "taken";
  }

  // hello USER NAME RANK SIZE: to rank 0 of that user
  std::string hello(Words& words) {
    const auto user = next<uid_t>(words);
    const auto name = shm_socket_name(user, next<std::string>(words));
    ShmMessage message;
    message.rank = next<int32_t>(words);
    message.size = next<int32_t>(words);
    while (!(socket_ = UnixSocket::connect(name))) {
      ::usleep(1000);
    }
    socket_->send(message.encode(), {});
    return {};
  }

  // What rank 0 answers to hello.
  std::string answer(Words&) {
    pollfd entry{socket_->descriptor(), POLLIN, 0};
    ::poll(&entry, 1, 10'000);
    Packet packet;
    socket_->receive(packet);
    return ShmMessage::decode(packet.bytes).value().text;
  }

  const std::map<std::string, std::function<std::string(Words&)>> commands_{
      {"join", [this](Words& w) { return join(w); }},
      {"threads", [this](Words& w) { return threads(w); }},
      {"write", [this](Words& w) { return write(w); }},
      {"read", [this](Words& w) { return read(w); }},
      {"write_read_only", [this](Words& w) { return write_read_only(w); }},
      {"reserve", [this](Words& w) { return reserve(w); }},
      {"reserve_alone", [this](Words& w) { return reserve_alone(w); }},
      {"describe", [this](Words& w) { return describe(w); }},
      {"is_dead", [this](Words& w) { return is_dead(w); }},
      {"fork", [this](Words& w) { return fork(w); }},
      {"clone", [this](Words& w) { return clone(w); }},
      {"occupy", [this](Words& w) { return occupy(w); }},
      {"write_own_page", [this](Words& w) { return write_own_page(w); }},
      {"forked", [this](Words& w) { return forked(w); }},
      {"leave", [this](Words& w) { return leave(w); }},
      {"limit_addresses", [this](Words& w) { return limit_addresses(w); }},
      {"limit_files", [this](Words& w) { return limit_files(w); }},
      {"deny", [this](Words& w) { return deny_call(w); }},
      {"become_user", [this](Words& w) { return become_user(w); }},
      {"listen", [this](Words& w) { return listen(w); }},
      {"hello", [this](Words& w) { return hello(w); }},
      {"answer", [this](Words& w) { return answer(w); }}};

  std::shared_ptr<ShmSegment> segment_;
  std::optional<UnixSocket> listener_;
  std::optional<UnixSocket> socket_;
  void* own_page_ = nullptr;
};

} // namespace
} // namespace fsdp::detail

int main() {
  ::alarm(fsdp::detail::kLongestLife);
  fsdp::detail::PeerCommands commands;
  std::string line;
  while (std::getline(std::cin, line)) {
    try {
      const std::string answer = commands.obey(line);
      std::cout << "ok" << (answer.empty() ? "" : " ") << answer << std::endl;
    } catch (const std::exception& e) {
      std::cout << "error " << e.what() << std::endl;
    }
  }
}
