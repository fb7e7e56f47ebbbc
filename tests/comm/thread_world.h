#pragma once

#include "comm/thread_communicator.h"

#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fsdp::detail {

/// Runs `body` as every rank of a world of threads. An exception that leaves
/// `body` is a test failure. A rank's communicator goes when its body is done.
inline void run_ranks(
    int size,
    const std::function<void(Communicator&)>& body,
    std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  std::vector<std::thread> threads;
  for (auto& communicator : make_thread_communicators(size, timeout)) {
    threads.emplace_back([mine = std::move(communicator), &body]() mutable {
      const auto own = std::move(mine);
      try {
        body(*own);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << own->rank() << ": " << e.what();
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
