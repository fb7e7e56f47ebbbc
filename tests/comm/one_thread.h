// For tests in which one thread is all ranks: issuing a call never waits.

#pragma once

#include "sample_data.h"
#include "thread_world.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::detail {

using Comm = std::shared_ptr<Communicator>;

/// The communicators of a world_kind() whose ranks join without waiting for
/// each other, by rank.
inline std::vector<Comm> make_ranks(
    int size,
    std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  const JoinWorld join = world_kind().make(size, timeout);
  std::vector<Comm> comms;
  for (int rank = 0; rank < size; ++rank) {
    comms.push_back(join(rank));
  }
  return comms;
}

/// Splits `comms` by `color_of` and `key_of` a rank; children by rank there.
template <class Color, class Key>
std::vector<Comm>
split_all(const std::vector<Comm>& comms, Color&& color_of, Key&& key_of) {
  std::vector<std::future<Comm>> children;
  for (const Comm& comm : comms) {
    const int rank = comm->rank();
    children.push_back(std::async(std::launch::async, [=] {
      return comm->split(color_of(rank), key_of(rank));
    }));
  }
  std::vector<Comm> result;
  for (auto& child : children) {
    result.push_back(child.get());
  }
  return result;
}

inline std::vector<Comm> split_all(const std::vector<Comm>& comms) {
  return split_all(
      comms, [](int) { return 0; }, [](int rank) { return rank; });
}

inline std::string barrier_error(Communicator& comm) {
  return error_of([&] { comm.barrier("b"); });
}

inline std::unique_ptr<Work> start_sum(Communicator& comm, Bytes& buffer) {
  return comm.all_reduce(buffer, DType::kInt32, ReduceOp::kSum, "sum");
}

/// All are in one epoch, and their calls give results.
inline void expect_all_meet(const std::vector<Comm>& comms) {
  const auto sum = static_cast<int32_t>(comms.size());
  std::vector<Bytes> buffers(comms.size(), bytes_of<int32_t>({1}));
  std::vector<std::unique_ptr<Work>> works;
  for (size_t r = 0; r < comms.size(); ++r) {
    works.push_back(start_sum(*comms[r], buffers[r]));
  }
  for (size_t r = 0; r < comms.size(); ++r) {
    works[r]->wait();
    EXPECT_EQ(buffers[r], bytes_of<int32_t>({sum}));
    EXPECT_EQ(comms[r]->epoch(), comms[0]->epoch());
  }
}

/// How long what waits for nobody may take, on a busy machine.
inline constexpr auto kAtOnce = std::chrono::seconds(5);

/// The errors of `calls` barriers of `comm`, none of which may wait for long.
inline std::vector<std::string> barrier_errors(Communicator& comm, int calls) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::string> texts;
  for (int i = 0; i < calls; ++i) {
    texts.push_back(barrier_error(comm));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kAtOnce);
  return texts;
}

/// `text` is the error of rank 0 of two whose peer has left.
inline void expect_gone(const std::string& text) {
  EXPECT_TRUE(
      contains(text, "rank 0/2 waits for rank 1, gone without this call"))
      << text;
}

} // namespace fsdp::detail
