#include "sample_data.h"
#include "thread_world.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>

namespace fsdp::detail {
namespace {

constexpr int64_t kNumels[] = {0, 1, 3, 5, 7, 10007};

std::vector<Bytes> samples_of_ranks(int size, DType dtype, int64_t numel) {
  std::vector<Bytes> samples;
  for (int r = 0; r < size; ++r) {
    samples.push_back(sample(dtype, numel, static_cast<uint64_t>(100 + r)));
  }
  return samples;
}

// Uneven and partly empty parts of `numel` elements.
std::vector<int64_t> uneven_cuts(int size, int64_t numel) {
  std::vector<int64_t> cuts = {0};
  for (int64_t r = 1; r < size; ++r) {
    cuts.push_back(numel * r * r / (size * size));
  }
  cuts.push_back(numel);
  return cuts;
}

Bytes cut_out(const Bytes& bytes, int64_t first, int64_t last) {
  return Bytes(bytes.begin() + first, bytes.begin() + last);
}

class Collectives : public testing::TestWithParam<int> {};

TEST_P(Collectives, AllGatherFillsTheSlicesOfTheOthers) {
  run_ranks(GetParam(), [](Communicator& comm) {
    for (int64_t count : kNumels) {
      const Bytes all = sample_bytes(count * comm.size(), 5);
      Bytes buffer(all.size());
      const int64_t first = count * comm.rank();
      std::copy_n(all.begin() + first, count, buffer.begin() + first);
      comm.all_gather(buffer, "all_gather of unit 'a'")->wait();
      ASSERT_EQ(buffer, all);
    }
  });
}

TEST_P(Collectives, ReduceScatterSumsEachPart) {
  run_ranks(GetParam(), [](Communicator& comm) {
    for (DType dtype : kAllDTypes) {
      for (int64_t numel : kNumels) {
        const auto inputs = samples_of_ranks(comm.size(), dtype, numel);
        const auto r = static_cast<size_t>(comm.rank());
        const auto cuts = uneven_cuts(comm.size(), numel);
        for (ReduceOp op : ops_of(dtype)) {
          const Bytes expected = cut_out(
              reference_reduce(op, dtype, inputs),
              cuts[r] * size_of(dtype),
              cuts[r + 1] * size_of(dtype));
          Bytes output(expected.size());
          comm.reduce_scatter(inputs[r], output, dtype, cuts, "unit 'a'", op)
              ->wait();
          ASSERT_EQ(output, expected);
        }
      }
    }
  });
}

TEST_P(Collectives, IntegersHaveNoMean) {
  run_ranks(GetParam(), [](Communicator& comm) {
    Bytes buffer(64);
    EXPECT_THROW(
        comm.all_reduce(buffer, DType::kInt32, ReduceOp::kMean, "a"),
        std::invalid_argument);
    comm.barrier("all are here");
  });
}

TEST_P(Collectives, AllReduceGivesTheSameBitsToAll) {
  run_ranks(GetParam(), [](Communicator& comm) {
    for (DType dtype : kAllDTypes) {
      for (int64_t numel : kNumels) {
        const auto inputs = samples_of_ranks(comm.size(), dtype, numel);
        for (ReduceOp op : ops_of(dtype)) {
          Bytes buffer = inputs[static_cast<size_t>(comm.rank())];
          comm.all_reduce(buffer, dtype, op, "norm")->wait();
          ASSERT_EQ(buffer, reference_reduce(op, dtype, inputs));
        }
      }
    }
  });
}

// Elements [3 * i, 3 * i + 2) of each three are given, in pieces of their own
// where `rank` and i are even and joined with what follows where not; the last
// of three is zero.
struct Pieces {
  explicit Pieces(int64_t numel) {
    for (int64_t at = 0; at < numel; at += 3) {
      const int64_t end = std::min(at + 2, numel);
      values.resize(static_cast<size_t>(end), 0.0F);
      for (int64_t i = at; i < end; ++i) {
        values[static_cast<size_t>(i)] = static_cast<float>(i + 1);
      }
    }
    values.resize(static_cast<size_t>(numel), 0.0F);
  }

  std::vector<Piece> of_rank(int rank) const {
    std::vector<Piece> pieces;
    const auto numel = std::ssize(values);
    for (int64_t at = 0; at < numel;) {
      const bool joined = (at / 3 + rank) % 2 != 0;
      const int64_t end = std::min(at + (joined ? 5 : 2), numel);
      pieces.push_back(
          {at * 4,
           std::as_bytes(std::span(values))
               .subspan(
                   static_cast<size_t>(at * 4),
                   static_cast<size_t>((end - at) * 4))});
      at = (end + 2) / 3 * 3;
    }
    return pieces;
  }

  std::vector<float> values;
};

TEST_P(Collectives, GapsBetweenPiecesAreZeros) {
  run_ranks(GetParam(), [](Communicator& comm) {
    for (int64_t numel : {0, 1, 3, 8, 100, 30'001}) {
      const Pieces pieces(numel);
      std::vector<float> sum = pieces.values;
      for (float& value : sum) {
        value *= static_cast<float>(comm.size());
      }
      const Bytes expected = bytes_of(sum);
      const auto cuts = uneven_cuts(comm.size(), numel);
      const auto r = static_cast<size_t>(comm.rank());
      const Bytes mine = cut_out(expected, cuts[r] * 4, cuts[r + 1] * 4);
      Bytes part(mine.size(), std::byte{0x7f});
      comm.reduce_scatter_pieces(
              pieces.of_rank(comm.rank()), part, DType::kFloat32, cuts, "a")
          ->wait();
      ASSERT_EQ(part, mine) << numel;
      Bytes all(expected.size(), std::byte{0x7f});
      comm.all_reduce_pieces(
              pieces.of_rank(comm.rank()),
              all,
              DType::kFloat32,
              ReduceOp::kSum,
              "b")
          ->wait();
      ASSERT_EQ(all, expected) << numel;
    }
  });
}

TEST_P(Collectives, DroppedCallsKeepTheirPieces) {
  run_ranks(GetParam(), [](Communicator& comm) {
    const int64_t numel = 200'000;
    const Pieces pieces(numel);
    std::vector<Bytes> results(6, Bytes(pieces.values.size() * 4));
    for (size_t i = 0; i < results.size(); ++i) {
      auto gone = std::make_unique<Pieces>(pieces);
      auto work = comm.all_reduce_pieces(
          gone->of_rank(comm.rank()),
          results[i],
          DType::kFloat32,
          ReduceOp::kSum,
          "a");
      if (i % 2 == static_cast<size_t>(comm.rank()) % 2) {
        work.reset(); // its buffers are not read any more
        std::fill(gone->values.begin(), gone->values.end(), -1.0F);
        std::fill(results[i].begin(), results[i].end(), std::byte{0});
        continue;
      }
      work->wait();
      EXPECT_EQ(
          values_of<float>(results[i])[1],
          2.0F * static_cast<float>(comm.size()));
    }
    comm.barrier("end");
  });
}

TEST_P(Collectives, PiecesThatCanNotBeRightAreRefused) {
  run_ranks(GetParam(), [](Communicator& comm) {
    const Bytes bytes(64);
    Bytes output(64);
    const std::span<const std::byte> all(bytes);
    const std::vector<std::vector<Piece>> wrong = {
        {{8, all.subspan(0, 8)}, {0, all.subspan(0, 8)}}, // order
        {{0, all.subspan(0, 8)}, {4, all.subspan(0, 8)}}, // one over another
        {{60, all.subspan(0, 8)}},                        // too long
        {{2, all.subspan(0, 8)}},                         // half an element
        {{0, all.subspan(0, 6)}},
        {{-4, all.subspan(0, 8)}}};
    for (const auto& pieces : wrong) {
      EXPECT_THROW(
          comm.all_reduce_pieces(
              pieces, output, DType::kFloat32, ReduceOp::kSum, "a"),
          std::invalid_argument);
    }
    comm.barrier("all are here");
  });
}

TEST_P(Collectives, BroadcastCopiesTheRoot) {
  run_ranks(GetParam(), [](Communicator& comm) {
    for (int64_t count : kNumels) {
      for (int root = 0; root < comm.size(); ++root) {
        const auto seed = static_cast<uint64_t>(comm.rank());
        Bytes buffer = sample_bytes(count, seed);
        comm.broadcast(buffer, root, "seed")->wait();
        ASSERT_EQ(buffer, sample_bytes(count, static_cast<uint64_t>(root)));
      }
    }
  });
}

TEST_P(Collectives, ExchangeKeepsEveryLength) {
  run_ranks(GetParam(), [](Communicator& comm) {
    const auto text_of = [](int rank) {
      return std::string(static_cast<size_t>(rank * 300), 'x') + '\0' +
          std::to_string(rank);
    };
    const auto all = comm.exchange(text_of(comm.rank()), "names");
    ASSERT_EQ(std::ssize(all), comm.size());
    for (int r = 0; r < comm.size(); ++r) {
      EXPECT_EQ(all[static_cast<size_t>(r)], text_of(r));
    }
    for (const std::string& text : comm.exchange("", "nothing")) {
      EXPECT_EQ(text, "");
    }
  });
}

TEST_P(Collectives, BarrierWaitsForAll) {
  std::atomic<int> arrived = 0;
  run_ranks(GetParam(), [&](Communicator& comm) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5 * comm.rank()));
    ++arrived;
    comm.barrier("start");
    EXPECT_EQ(arrived, comm.size());
  });
}

TEST_P(Collectives, WorksMayBeWaitedForInAnyOrder) {
  run_ranks(GetParam(), [](Communicator& comm) {
    constexpr int64_t kWorks = 6;
    std::vector<Bytes> buffers;
    std::vector<std::unique_ptr<Work>> works;
    for (int64_t i = 0; i < kWorks; ++i) {
      const auto seed = static_cast<uint64_t>(10 * i + comm.rank());
      buffers.push_back(sample(DType::kFloat32, 100 * (i + 1), seed));
      works.push_back(comm.all_reduce(
          buffers.back(), DType::kFloat32, ReduceOp::kSum, std::to_string(i)));
    }
    for (int64_t n = 0; n < kWorks; ++n) {
      const int64_t i = (5 * n + comm.rank()) % kWorks;
      works[static_cast<size_t>(i)]->wait();
      std::vector<Bytes> inputs;
      for (int r = 0; r < comm.size(); ++r) {
        const auto seed = static_cast<uint64_t>(10 * i + r);
        inputs.push_back(sample(DType::kFloat32, 100 * (i + 1), seed));
      }
      EXPECT_EQ(
          buffers[static_cast<size_t>(i)],
          reference_reduce(ReduceOp::kSum, DType::kFloat32, inputs));
    }
  });
}

TEST_P(Collectives, DroppedWorksDoNotMatter) {
  run_ranks(GetParam(), [](Communicator& comm) {
    for (int i = 0; i < 50; ++i) {
      Bytes buffer(static_cast<size_t>(comm.size()));
      auto work = comm.all_gather(buffer, "dropped");
      if (i % comm.size() == comm.rank()) {
        work->wait();
      }
      work.reset();
      comm.barrier("next");
    }
  });
}

TEST_P(Collectives, SplitOrdersByKeyThenRank) {
  run_ranks(GetParam(), [](Communicator& comm) {
    const int color = comm.rank() % 2;
    const auto child = comm.split(color, -(comm.rank() / 2));
    const int members = (comm.size() + 1 - color) / 2;
    EXPECT_EQ(child->size(), members);
    EXPECT_EQ(child->rank(), members - 1 - comm.rank() / 2);
    EXPECT_EQ(child->timeout(), comm.timeout());
    const auto ranks = child->exchange(std::to_string(comm.rank()), "ranks");
    for (int i = 0; i < members; ++i) {
      const int parent = 2 * (members - 1 - i) + color;
      EXPECT_EQ(ranks[static_cast<size_t>(i)], std::to_string(parent));
    }
    EXPECT_EQ(comm.split(0, 7)->rank(), comm.rank());
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ranks,
    Collectives,
    testing::Range(1, 6),
    testing::PrintToStringParamName());

} // namespace
} // namespace fsdp::detail
