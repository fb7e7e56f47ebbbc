#pragma once

#include "sample_data.h"

#include <fsdp/communicator.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::detail {

/// One rank of a program of random collectives. All ranks draw the same program
/// from `plan_`; only the moments when they wait are their own. A wrong result
/// is a std::logic_error.
class RandomProgram {
 public:
  /// Most calls have at most 99 elements; one in `one_in` may have `large`.
  struct Sizes {
    int64_t large = 99;
    int64_t one_in = 1;
  };

  RandomProgram(Communicator& world, uint64_t seed)
      : RandomProgram(world, seed, Sizes{}) {}

  RandomProgram(Communicator& world, uint64_t seed, Sizes sizes)
      : world_(world),
        sizes_(sizes),
        plan_(seed),
        own_(seed * 100 + static_cast<uint64_t>(world.rank())) {
    groups_.push_back({&world, nullptr});
  }

  void run(int calls) {
    for (int i = 0; i < calls; ++i) {
      step(i);
      while (std::ssize(pending_) > draw(own_, 5)) {
        finish(draw(own_, std::ssize(pending_)));
      }
    }
    while (!pending_.empty()) {
      finish(0);
    }
  }

 private:
  struct Group {
    Communicator* comm;
    std::shared_ptr<Communicator> owner; // of a sub-group
  };

  struct Pending {
    std::string what;
    std::unique_ptr<Work> work;
    std::unique_ptr<Bytes> input;
    std::unique_ptr<Bytes> buffer;
    Bytes expected;
  };

  // What is longer repeats itself, since samples take long to draw.
  static constexpr int64_t kPeriod = 10'007;

  static int64_t draw(std::mt19937_64& random, int64_t limit) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
  }

  static void check(bool is_right, const std::string& what) {
    if (!is_right) {
      throw std::logic_error("wrong result of " + what);
    }
  }

  int64_t draw_numel() {
    if (draw(plan_, 3) == 0) {
      return draw(plan_, 4);
    }
    const bool is_large = draw(plan_, sizes_.one_in) == 0;
    return draw(plan_, is_large ? sizes_.large : 99);
  }

  void step(int call) {
    const std::string what = "call " + std::to_string(call);
    Communicator& comm =
        *groups_[static_cast<size_t>(draw(plan_, std::ssize(groups_)))].comm;
    const int64_t numel = draw_numel();
    const DType dtype = kAllDTypes[draw(plan_, std::ssize(kAllDTypes))];
    // Sub-groups differ in size and so must not draw: all did that above.
    const uint64_t choice = plan_();
    const uint64_t seed = plan_();
    switch (choice % 16) {
      case 0:
        comm.barrier(what);
        break;
      case 1:
        exchange(comm, seed, what);
        break;
      case 2:
        split(seed);
        break;
      case 3:
      case 4:
        broadcast(comm, numel, seed, what);
        break;
      case 5:
      case 6:
      case 7:
        all_reduce(comm, numel, dtype, seed, what);
        break;
      case 8:
      case 9:
      case 10:
      case 11:
        reduce_scatter(comm, numel, dtype, seed, what);
        break;
      default:
        all_gather(comm, numel, seed, what);
    }
  }

  std::vector<Bytes> inputs_of(
      const Communicator& comm,
      int64_t numel,
      DType dtype,
      uint64_t seed) {
    std::vector<Bytes> inputs;
    for (int r = 0; r < comm.size(); ++r) {
      inputs.push_back(sample(
          dtype, std::min(numel, kPeriod), seed + static_cast<uint64_t>(r)));
    }
    return inputs;
  }

  /// `count` bytes that repeat those of `period`.
  static Bytes repeat(const Bytes& period, int64_t count) {
    Bytes bytes(static_cast<size_t>(count));
    for (size_t at = 0; at < bytes.size(); at += period.size()) {
      std::copy_n(
          period.begin(),
          std::min(period.size(), bytes.size() - at),
          bytes.begin() + static_cast<int64_t>(at));
    }
    return bytes;
  }

  static Bytes repeated_bytes(int64_t count, uint64_t seed) {
    return repeat(sample_bytes(std::min(count, kPeriod), seed), count);
  }

  Pending& add(std::string what, Bytes input, Bytes buffer, Bytes expected) {
    pending_.push_back(
        {std::move(what),
         nullptr,
         std::make_unique<Bytes>(std::move(input)),
         std::make_unique<Bytes>(std::move(buffer)),
         std::move(expected)});
    return pending_.back();
  }

  void exchange(Communicator& comm, uint64_t seed, const std::string& what) {
    const auto text = [&](int rank) {
      return std::string((seed + static_cast<uint64_t>(rank)) % 20, 'x');
    };
    const auto all = comm.exchange(text(comm.rank()), what);
    for (int r = 0; r < comm.size(); ++r) {
      check(all[static_cast<size_t>(r)] == text(r), what);
    }
  }

  void split(uint64_t seed) {
    const int color = static_cast<int>((seed >> world_.rank()) & 1);
    const auto child = world_.split(color, world_.rank());
    if (groups_.size() == 4) {
      groups_.erase(groups_.begin() + 1);
    }
    groups_.push_back({child.get(), child});
  }

  void broadcast(
      Communicator& comm,
      int64_t numel,
      uint64_t seed,
      const std::string& what) {
    const int root =
        static_cast<int>(seed % static_cast<uint64_t>(comm.size()));
    const Bytes bytes = repeated_bytes(numel, seed);
    Pending& pending =
        add(what, {}, comm.rank() == root ? bytes : Bytes(bytes.size()), bytes);
    pending.work = comm.broadcast(*pending.buffer, root, what);
  }

  void all_reduce(
      Communicator& comm,
      int64_t numel,
      DType dtype,
      uint64_t seed,
      const std::string& what) {
    const auto inputs = inputs_of(comm, numel, dtype, seed);
    const int64_t bytes = numel * size_of(dtype);
    const auto ops = ops_of(dtype);
    const ReduceOp op = ops[seed % ops.size()];
    Pending& pending =
        add(what,
            {},
            repeat(inputs[static_cast<size_t>(comm.rank())], bytes),
            repeat(reference_reduce(op, dtype, inputs), bytes));
    if (draw(own_, 2) == 0) {
      pending.work = comm.all_reduce(*pending.buffer, dtype, op, what);
      return;
    }
    if (draw(own_, 2) == 0) { // not in place
      *pending.input = *pending.buffer;
      std::fill(
          pending.buffer->begin(), pending.buffer->end(), std::byte{0x7f});
    }
    const Bytes& input =
        pending.input->empty() ? *pending.buffer : *pending.input;
    pending.work = comm.all_reduce_pieces(
        pieces_of(input, size_of(dtype)), *pending.buffer, dtype, op, what);
  }

  void reduce_scatter(
      Communicator& comm,
      int64_t numel,
      DType dtype,
      uint64_t seed,
      const std::string& what) {
    const auto inputs = inputs_of(comm, numel, dtype, seed);
    const int64_t bytes = numel * size_of(dtype);
    const auto ops = ops_of(dtype);
    const ReduceOp op = ops[seed % ops.size()];
    std::mt19937_64 random(seed);
    std::vector<int64_t> cuts = {0, numel};
    while (std::ssize(cuts) <= comm.size()) {
      cuts.push_back(draw(random, numel + 1));
    }
    std::sort(cuts.begin(), cuts.end());
    const auto r = static_cast<size_t>(comm.rank());
    const Bytes sum = repeat(reference_reduce(op, dtype, inputs), bytes);
    const Bytes part(
        sum.begin() + cuts[r] * size_of(dtype),
        sum.begin() + cuts[r + 1] * size_of(dtype));
    Pending& pending =
        add(what, repeat(inputs[r], bytes), Bytes(part.size()), part);
    pending.work = draw(own_, 2) == 0
        ? comm.reduce_scatter(
              *pending.input, *pending.buffer, dtype, cuts, what, op)
        : comm.reduce_scatter_pieces(
              pieces_of(*pending.input, size_of(dtype)),
              *pending.buffer,
              dtype,
              cuts,
              what,
              op);
  }

  /// `bytes` cut into pieces at will.
  std::vector<Piece> pieces_of(const Bytes& bytes, int64_t element) {
    std::vector<Piece> pieces;
    const int64_t numel = std::ssize(bytes) / element;
    for (int64_t at = 0; at < numel;) {
      const int64_t next = at + 1 + draw(own_, numel - at);
      pieces.push_back(
          {at * element,
           std::span(bytes).subspan(
               static_cast<size_t>(at * element),
               static_cast<size_t>((next - at) * element))});
      at = next;
    }
    return pieces;
  }

  void all_gather(
      Communicator& comm,
      int64_t numel,
      uint64_t seed,
      const std::string& what) {
    const Bytes all = repeated_bytes(numel * comm.size(), seed);
    Bytes buffer(all.size());
    const int64_t first = numel * comm.rank();
    std::copy_n(all.begin() + first, numel, buffer.begin() + first);
    Pending& pending = add(what, {}, std::move(buffer), all);
    pending.work = comm.all_gather(*pending.buffer, what);
  }

  void finish(int64_t index) {
    const Pending& pending = pending_[static_cast<size_t>(index)];
    pending.work->wait();
    check(*pending.buffer == pending.expected, pending.what);
    pending_.erase(pending_.begin() + index);
  }

  Communicator& world_;
  Sizes sizes_;
  std::mt19937_64 plan_;
  std::mt19937_64 own_;
  std::vector<Group> groups_;
  std::vector<Pending> pending_;
};

} // namespace fsdp::detail
