// Weights in shared memory, see [Note: Generations]: nobody reads what is being
// written, and nobody writes what is being read.

#include "sharded_training.h"
#include "shm_world.h"

#include <gtest/gtest.h>

#include <mutex>
#include <utility>

namespace fsdp::detail {
namespace {

using std::chrono::seconds;

class Generations : public testing::TestWithParam<int> {};

TEST_P(Generations, KeepReadersAndWritersApart) {
  run_ranks(GetParam(), [](Communicator& world) {
    ShardedTraining training(world, {.seed = 7, .steps = 300});
    training.run();
    EXPECT_GT(training.failed_steps(), 30);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ranks,
    Generations,
    testing::Values(1, 2, 4, 8),
    testing::PrintToStringParamName());

// The same with one wait left out: each is needed, and would be missed.

/// SharedSlices that leave out what a test overrides.
class SlicesWithout : public SharedSlices {
 public:
  explicit SlicesWithout(std::shared_ptr<SharedSlices> inner)
      : inner_(std::move(inner)) {}

  std::span<std::byte> own(size_t buffer) override {
    return inner_->own(buffer);
  }
  std::span<const std::byte> whole(size_t buffer) override {
    return inner_->whole(buffer);
  }
  void publish() override { inner_->publish(); }
  void await_published(const std::string& what) override {
    inner_->await_published(what);
  }
  void retire() override { inner_->retire(); }
  void await_retired(const std::string& what) override {
    inner_->await_retired(what);
  }

 protected:
  SharedSlices& inner() { return *inner_; }

 private:
  std::shared_ptr<SharedSlices> inner_;
};

class ReadsAtOnce : public SlicesWithout {
 public:
  using SlicesWithout::SlicesWithout;
  void await_published(const std::string&) override {}
};

class WritesAtOnce : public SlicesWithout {
 public:
  using SlicesWithout::SlicesWithout;
  void await_retired(const std::string&) override {}
};

class PublishesBeforeItWrites : public SlicesWithout {
 public:
  using SlicesWithout::SlicesWithout;
  void await_retired(const std::string& what) override {
    inner().await_retired(what);
    inner().publish();
    is_published_ = true;
  }
  void publish() override {
    if (!std::exchange(is_published_, false)) {
      inner().publish();
    }
  }

 private:
  bool is_published_ = false;
};

class RetiresBeforeItReads : public SlicesWithout {
 public:
  using SlicesWithout::SlicesWithout;
  void publish() override {
    is_retired_ = false;
    inner().publish();
  }
  void await_published(const std::string& what) override {
    inner().await_published(what);
    retire();
  }
  void retire() override {
    if (!std::exchange(is_retired_, true)) {
      inner().retire();
    }
  }

 private:
  bool is_retired_ = false;
};

template <class Slices>
class TrainingOver : public ShardedTraining {
 public:
  using ShardedTraining::ShardedTraining;

 protected:
  std::shared_ptr<SharedSlices> slices_to_use(
      std::shared_ptr<SharedSlices> slices) override {
    return std::make_shared<Slices>(std::move(slices));
  }
};

class TrainingThatWritesUnasked : public ShardedTraining {
 public:
  using ShardedTraining::ShardedTraining;

 protected:
  void await_write() override {}
};

class TrainingWithoutReductionWait : public ShardedTraining {
 public:
  using ShardedTraining::ShardedTraining;

 protected:
  void await_reduction(Work&) override {}
};

class TrainingWithoutEndOfSettlement : public ShardedTraining {
 public:
  using ShardedTraining::ShardedTraining;

 protected:
  void await_end_of_settlement() override {}
};

/// The errors of all ranks in training of this kind.
template <class Training>
std::string errors_of(int size) {
  std::mutex mutex;
  std::string errors;
  run_ranks(
      size,
      [&](Communicator& world) {
        Training training(world, {.seed = 3, .steps = 300, .pauses = 100});
        const auto text = error_of<std::exception>([&] { training.run(); });
        const std::lock_guard lock(mutex);
        errors += text + "\n";
      },
      seconds(5));
  return errors;
}

TEST(GenerationsWithout, TheWaitForPublishingReadsOldWeights) {
  const auto text = errors_of<TrainingOver<ReadsAtOnce>>(4);
  EXPECT_TRUE(contains(text, "wrong weight")) << text;
}

TEST(GenerationsWithout, TheWaitForRetiringChangesWeightsUnderReaders) {
  const auto text = errors_of<TrainingOver<WritesAtOnce>>(4);
  EXPECT_TRUE(contains(text, "wrong weight")) << text;
}

TEST(GenerationsWithout, WritingBeforePublishingReadsOldWeights) {
  const auto text = errors_of<TrainingOver<PublishesBeforeItWrites>>(4);
  EXPECT_TRUE(contains(text, "wrong weight")) << text;
}

TEST(GenerationsWithout, ReadingBeforeRetiringChangesWeightsUnderReaders) {
  const auto text = errors_of<TrainingOver<RetiresBeforeItReads>>(4);
  EXPECT_TRUE(contains(text, "wrong weight")) << text;
}

TEST(GenerationsWithout, TheWaitOfAWriteChangesWeightsUnderReaders) {
  const auto text = errors_of<TrainingThatWritesUnasked>(4);
  EXPECT_TRUE(contains(text, "wrong weight")) << text;
}

TEST(GenerationsWithout, TheWaitForReductionsGivesWrongGradients) {
  const auto text = errors_of<TrainingWithoutReductionWait>(2);
  EXPECT_TRUE(contains(text, "wrong gradient")) << text;
}

TEST(GenerationsWithout, TheEndOfTheSettlementAssignsGradientsOfAFailedStep) {
  const auto text = errors_of<TrainingWithoutEndOfSettlement>(2);
  EXPECT_TRUE(contains(text, "a rank has failed in it")) << text;
}

} // namespace
} // namespace fsdp::detail
