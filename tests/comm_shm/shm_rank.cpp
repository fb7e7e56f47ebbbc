// A rank as a process of its own. It reads one line,
//   WHAT JOB RANK SIZE TIMEOUT_MS SEED COUNT
// and answers "running", then "done" or "error TEXT"; see ShmPeer. WHAT is:
//   calls     collectives until there is an error, then "later TEXT" of one
//   more random    COUNT random collectives training  COUNT steps of
//   ShardedTraining exit      rank 1 ends its process, the others call a
//   collective leave     rank 1 lets go of its communicator, the others call a
//   collective

#include "comm/random_program.h"
#include "comm/shm_communicator.h"
#include "sharded_training.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::detail {
namespace {

constexpr unsigned kLongestLife = 600; // seconds, whatever becomes of the test

struct Job {
  std::string what;
  ShmAddress address;
  int timeout_ms = 0;
  uint64_t seed = 0;
  int count = 0;
};

std::istream& operator>>(std::istream& in, Job& job) {
  return in >> job.what >> job.address.name >> job.address.rank >>
      job.address.size >> job.timeout_ms >> job.seed >> job.count;
}

void say(const std::string& line) {
  std::cout << line << std::endl;
}

void call_all(Communicator& comm, Communicator& child) {
  std::vector<std::byte> small(static_cast<size_t>(8 * comm.size()));
  std::vector<std::byte> large(size_t{400} << 10);
  comm.all_gather(small, "all_gather of unit 'a'")->wait();
  child.all_reduce(large, DType::kFloat32, ReduceOp::kSum, "norm")->wait();
  child.barrier("start");
  comm.exchange("x", "names");
}

void call_until_error(Communicator& comm) {
  const auto child = comm.split(0, -comm.rank());
  for (int i = 0; i < 20; ++i) {
    call_all(comm, *child);
  }
  say("running");
  try {
    while (true) {
      call_all(comm, *child);
    }
  } catch (const CommunicationError& error) {
    say(std::string("error ") + error.what());
  }
  try {
    comm.barrier("one more");
    say("later nothing");
  } catch (const CommunicationError& error) {
    say(std::string("later ") + error.what());
  }
}

void run(const Job& job, Communicator& comm) {
  if (job.what == "calls") {
    call_until_error(comm);
    return;
  }
  comm.barrier("all have come");
  say("running");
  if (job.what == "random") {
    RandomProgram(comm, job.seed, {.large = 2 << 20, .one_in = 200})
        .run(job.count);
  } else if (job.what == "training") {
    ShardedTraining(comm, {.seed = job.seed, .steps = job.count}).run();
  } else if (job.what == "exit" && comm.rank() == 1) {
    std::_Exit(0);
  } else if (job.what == "leave" && comm.rank() == 1) {
    return;
  }
  comm.barrier("end");
  say("done");
}

void join_and_run() {
  Job job;
  std::cin >> job;
  const std::chrono::milliseconds timeout(job.timeout_ms);
  job.address.timeout = std::chrono::seconds(30);
  const auto comm =
      make_shm_communicator(ShmSegment::join(job.address), timeout);
  run(job, *comm);
}

} // namespace
} // namespace fsdp::detail

int main() {
  ::alarm(fsdp::detail::kLongestLife);
  try {
    fsdp::detail::join_and_run();
  } catch (const std::exception& error) {
    std::cout << "error " << error.what() << std::endl;
    return 1;
  }
}
