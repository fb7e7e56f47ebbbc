#pragma once

#include "comm/thread_communicator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fsdp::detail {

/// Makes the communicator of a rank; every rank calls it once, in its thread.
using JoinWorld = std::function<std::shared_ptr<Communicator>(int rank)>;

/// What the worlds of run_ranks() are. Tests of what all back ends have in
/// common are compiled into a test program of each; one that is not about
/// threads sets world_kind() before its tests run.
struct WorldKind {
  std::function<JoinWorld(int size, std::chrono::milliseconds timeout)> make;
  int slowness = 1; // of a call or a failure, compared with threads
};

inline JoinWorld make_world_of_threads(
    int size,
    std::chrono::milliseconds timeout) {
  auto all = std::make_shared<std::vector<std::shared_ptr<Communicator>>>(
      make_thread_communicators(size, timeout));
  return
      [all](int rank) { return std::move(all->at(static_cast<size_t>(rank))); };
}

inline WorldKind& world_kind() {
  static WorldKind kind{make_world_of_threads};
  return kind;
}

/// As many of `rounds` as there is time for.
inline int affordable(int rounds) {
  return std::max(1, rounds / world_kind().slowness);
}

/// Runs `body` as every rank of a world, each a thread. An exception that
/// leaves `body` is a test failure. A rank's communicator goes when its body is
/// done.
inline void run_ranks(
    int size,
    const std::function<void(Communicator&)>& body,
    std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  const JoinWorld join = world_kind().make(size, timeout);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(*join(rank));
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << rank << ": " << e.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

/// The text of the Error that `call` throws, or "no error".
template <class Error = CommunicationError, class Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

} // namespace fsdp::detail
