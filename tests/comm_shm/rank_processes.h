#pragma once

#include "comm/shm_peer_program.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::detail {

/// Ranks as processes, each a running shm_rank.cpp that has been told what to
/// do and is "running".
class RankProcesses {
 public:
  struct Job {
    std::string what;
    std::chrono::milliseconds timeout = std::chrono::seconds(30);
    uint64_t seed = 1;
    int count = 0;
  };

  RankProcesses(int size, const Job& job) {
    static int started = 0;
    const auto name = shm_test_job() + "-" + std::to_string(started++);
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back(std::make_unique<ShmPeer>("shm_rank"));
      ranks_.back()->tell(
          job.what + " " + name + " " + std::to_string(rank) + " " +
          std::to_string(size) + " " + std::to_string(job.timeout.count()) +
          " " + std::to_string(job.seed) + " " + std::to_string(job.count));
    }
    for (const auto& each : ranks_) {
      EXPECT_EQ(each->answer(), "running");
    }
  }

  int size() const { return static_cast<int>(ranks_.size()); }

  ShmPeer& operator[](int rank) { return *ranks_[static_cast<size_t>(rank)]; }

  void expect_done(std::chrono::seconds limit) {
    for (int rank = 0; rank < size(); ++rank) {
      EXPECT_EQ((*this)[rank].answer(limit), "done") << "rank " << rank;
    }
  }

 private:
  std::vector<std::unique_ptr<ShmPeer>> ranks_;
};

} // namespace fsdp::detail
