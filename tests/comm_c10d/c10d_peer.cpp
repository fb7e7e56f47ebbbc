// One rank of a Gloo world as a process: c10d_peer MODE STORE_FILE RANK SIZE.
// Rank 1 dies as MODE says; the others print "MILLISECONDS TEXT" of the error
// that they get then: the time from when rank 1 wrote it dies.

#include "comm/gloo_communicator.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <iostream>
#include <string>
#include <thread>

namespace {

using fsdp::CommunicationError;
using fsdp::Communicator;

int64_t now_ms() {
  const auto time = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
}

[[noreturn]] void die(c10d::Store& store) {
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  store.set("died", std::to_string(now_ms()));
  ::kill(::getpid(), SIGKILL);
  std::abort();
}

void run(const std::string& mode, Communicator& comm, c10d::Store& store) {
  const auto child = comm.split(0, comm.rank());
  if (mode == "new_group" && comm.rank() == 0) {
    comm.signal_failure("a step"); // rank 1 never comes to the next epoch
  }
  if (comm.rank() == 1) {
    die(store);
  }
  if (mode == "large_call") {
    std::vector<std::byte> buffer(static_cast<size_t>(comm.size()) * (8 << 20));
    child->all_gather(buffer, "all_gather of unit 'a'")->wait();
  }
  try {
    comm.barrier("step");
  } catch (const CommunicationError& error) {
    if (mode != "new_group" || !comm.aborted().empty()) {
      throw;
    }
  }
  comm.barrier("next step");
}

} // namespace

int main(int, char** arguments) {
  const std::string mode = arguments[1];
  const int rank = std::stoi(arguments[3]);
  const int size = std::stoi(arguments[4]);
  const auto store = c10::make_intrusive<c10d::FileStore>(arguments[2], size);
  try {
    const auto comm = fsdp::detail::make_gloo_communicator(
        store,
        rank,
        size,
        std::chrono::seconds(30),
        fsdp::detail::GlooInterface::kLoopback);
    run(mode, *comm, *store);
    std::cout << "no error" << std::endl;
  } catch (const CommunicationError& error) {
    const int64_t after = now_ms() - std::stoll(store->get_to_str("died"));
    std::cout << after << " " << error.what() << std::endl;
  }
  return 0;
}
