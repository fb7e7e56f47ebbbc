#include "harness/ranks.h"

#include "comm/shm_communicator.h"
#include "comm/shm_segment.h"
#include "harness/job.h"
#include "harness/outcome.h"

#include <ATen/Parallel.h>

#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace fsdp::testing {

namespace {

constexpr size_t kSegmentBytes = size_t{4} << 30; // of address space

WorldKind kind_from_environment() {
  const char* text = std::getenv("FSDP_TEST_WORLD");
  const std::string name = text == nullptr ? "threads" : text;
  if (name == "threads") {
    return WorldKind::kThreads;
  }
  if (name == "shm_threads") {
    return WorldKind::kShmThreads;
  }
  if (name == "processes") {
    return WorldKind::kProcesses;
  }
  throw std::invalid_argument(
      "FSDP_TEST_WORLD: expected threads, shm_threads or processes, but got '" +
      name + "'");
}

void run_shm_threads(
    int size,
    const std::function<void(const World&)>& rank_main,
    std::chrono::milliseconds timeout) {
  const auto segments = detail::ShmSegment::for_threads(size, kSegmentBytes);
  std::vector<Outcome> outcomes(segments.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < segments.size(); ++rank) {
    threads.emplace_back([&, rank] {
      const World world(detail::make_shm_communicator(segments[rank], timeout));
      outcomes[rank] = run_rank(world, rank_main);
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  rethrow_first(outcomes);
}

} // namespace

WorldKind world_kind() {
  static const WorldKind kind = kind_from_environment();
  return kind;
}

bool weights_are_shared() {
  return are_processes() ? Job::current().shares_memory()
                         : world_kind() == WorldKind::kShmThreads;
}

void run_ranks(
    int size,
    const std::function<void(const World&)>& rank_main,
    std::chrono::milliseconds timeout) {
  at::get_num_threads(); // threads that race in its first call abort
  switch (world_kind()) {
    case WorldKind::kThreads:
      return run_as_threads(size, rank_main, timeout);
    case WorldKind::kShmThreads:
      return run_shm_threads(size, rank_main, timeout);
    case WorldKind::kProcesses:
      return Job::current().run_ranks(size, rank_main);
  }
}

int count_of_ranks_here(int size) {
  if (!are_processes()) {
    return size;
  }
  return Job::current().rank() < size ? 1 : 0;
}

void share_results(std::vector<std::string>& by_rank) {
  if (are_processes()) {
    Job::current().share(by_rank);
  }
}

void share_results(std::vector<double>& by_rank) {
  std::vector<std::string> bytes;
  for (const double value : by_rank) {
    bytes.emplace_back(reinterpret_cast<const char*>(&value), sizeof value);
  }
  share_results(bytes);
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    std::memcpy(&by_rank[rank], bytes[rank].data(), sizeof(double));
  }
}

std::vector<int> tested_world_sizes() {
  const char* text = std::getenv("FSDP_TEST_WORLD_SIZES");
  std::istringstream stream(text == nullptr ? "1,2,3,4" : text);
  std::vector<int> sizes;
  for (std::string size; std::getline(stream, size, ',');) {
    sizes.push_back(std::stoi(size));
  }
  return sizes;
}

} // namespace fsdp::testing
