// The comparison notices a net that is slightly wrong.

#include "harness/forwarding_communicator.h"
#include "random/run.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>

#include <cstring>

namespace fsdp::random_models {
namespace {

enum class Fault : uint8_t { kNone, kGather, kReduce };

/// float64 only: adds 1e-7 to the first element of the first slice of a gather,
/// or of what a reduction returns.
class SlightlyWrong : public testing::ForwardingCommunicator {
 public:
  SlightlyWrong(std::shared_ptr<Communicator> inner, Fault fault)
      : ForwardingCommunicator(std::move(inner)),
        fault_(fault) {}

  std::unique_ptr<Work> all_gather(
      std::span<std::byte> buffer,
      std::string what) override {
    return finish(inner().all_gather(buffer, what), buffer, Fault::kGather);
  }
  std::unique_ptr<Work> reduce_scatter(
      std::span<const std::byte> input,
      std::span<std::byte> output,
      DType dtype,
      std::span<const int64_t> cuts,
      std::string what,
      ReduceOp op) override {
    return finish(
        inner().reduce_scatter(input, output, dtype, cuts, what, op),
        output,
        Fault::kReduce);
  }
  std::unique_ptr<Work> all_reduce(
      std::span<std::byte> buffer,
      DType dtype,
      ReduceOp op,
      std::string what) override {
    return finish(
        inner().all_reduce(buffer, dtype, op, what), buffer, Fault::kReduce);
  }
  std::shared_ptr<Communicator> split(int color, int key) override {
    return std::make_shared<SlightlyWrong>(inner().split(color, key), fault_);
  }

 private:
  std::unique_ptr<Work>
  finish(std::unique_ptr<Work> work, std::span<std::byte> data, Fault fault) {
    if (fault == fault_ && data.size() >= sizeof(double)) {
      work->wait();
      double first = 0.0;
      std::memcpy(&first, data.data(), sizeof(first));
      first += 1e-7;
      std::memcpy(data.data(), &first, sizeof(first));
    }
    return work;
  }

  Fault fault_;
};

std::string failure_with(Fault fault, const std::string& text) {
  RunSettings settings;
  settings.wrap = [fault](const World& world) {
    // The world is the caller's and outlives the run.
    return World(std::make_shared<SlightlyWrong>(
        world.communicator().split(0, world.rank()), fault));
  };
  return failure_of(parse(text), settings);
}

constexpr const char* kModel =
    "seed=4 world=2 rows=3 steps=2 units=layer linear:in=4:out=5:bias=1";

TEST(RandomModelsNotice, NothingWhenNothingIsWrong) {
  EXPECT_EQ(failure_with(Fault::kNone, kModel), "");
}

TEST(RandomModelsNotice, AWeightThatIsSlightlyWrong) {
  const auto failure = failure_with(Fault::kGather, kModel);
  EXPECT_EQ(failure.find("full shard: the gradient in update 0 of "), 0)
      << failure;
}

TEST(RandomModelsNotice, AGradientThatIsSlightlyWrong) {
  const auto failure = failure_with(Fault::kReduce, kModel);
  EXPECT_EQ(failure.find("full shard: the gradient in update 0 of "), 0)
      << failure;
}

TEST(RandomModelsNotice, AReplicaThatIsSlightlyWrong) {
  const auto spec = parse(kModel);
  RunSettings settings;
  settings.wrap = [](const World& world) {
    return World(std::make_shared<SlightlyWrong>(
        world.communicator().split(0, world.rank()),
        world.rank() == 1 ? Fault::kReduce : Fault::kNone));
  };
  EXPECT_THROW(train_sharded(spec, Cut::kNoShard, settings), std::exception);
}

TEST(RandomModelsNotice, AModelThatCannotTrainUnsharded) {
  // A vector as the matrix of a linear layer; normalize() would not let it
  // pass.
  EXPECT_EQ(failure_of(parse("scale tied")).find(kUnsharded), 0);
}

} // namespace
} // namespace fsdp::random_models
