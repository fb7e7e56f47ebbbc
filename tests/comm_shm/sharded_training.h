#pragma once

#include "comm/shared_weights.h"

#include <fsdp/communicator.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace fsdp::detail {

/// A weight, a gradient or an outcome is not what it must be.
class WrongTraining : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// One rank of a job that shares its weights and reduces its gradients as a net
/// does, see [Note: Generations] and [Note: Order of reductions], but without
/// tensors: it knows every weight that it must read and every gradient that it
/// must get, and checks all of them. Ranks evaluate different numbers of times,
/// accumulate, leave units unused, write weights outside of steps, fail in all
/// places, and pause at random.
///
/// The waits are virtual so that a test can leave one out, and see that it is
/// missed.
class ShardedTraining {
 public:
  struct Settings {
    uint64_t seed = 1;
    int steps = 300;
    int pauses = 20; // in a thousand places where a rank may pause
  };

  ShardedTraining(Communicator& world, Settings settings);
  virtual ~ShardedTraining() = default;
  ShardedTraining(const ShardedTraining&) = delete;
  ShardedTraining& operator=(const ShardedTraining&) = delete;

  /// Throws WrongTraining, after it has told the peers.
  void run();

  int failed_steps() const { return failed_steps_; }

 protected:
  virtual std::shared_ptr<SharedSlices> slices_to_use(
      std::shared_ptr<SharedSlices> slices) {
    return slices;
  }
  virtual void await_write() { weights_->await_writable("write to a shard"); }
  virtual void await_reduction(Work& work) { work.wait(); }
  virtual void await_end_of_settlement() {
    reports_->barrier("end of the settlement");
  }

 private:
  static constexpr size_t kUnits = 4;
  static constexpr std::array<size_t, kUnits> kSliceNumel = {64, 1, 1500, 300};

  enum class Place {
    kNowhere,
    kOpening, // of a region, before its weights are published
    kForward,
    kBackward,
    kEndOfBackward,
    kSettlement, // when all is reduced
  };

  /// A step, as all ranks know it.
  struct Step {
    int number = 0;
    int micro_batches = 1;
    Place failure = Place::kNowhere;
    int failing_rank = 0;
    int failing_micro_batch = 0;
    bool evaluates_before_write = false;
    bool writes_again = false; // averaged weights, for instance

    bool fails() const { return failure != Place::kNowhere; }
    std::string failure_text() const;
  };

  struct Reduction {
    std::vector<float> input;
    std::vector<float> output;
    std::unique_ptr<Work> work;
  };

  /// The gradients of a unit that are not settled.
  struct Gradients {
    std::vector<float> sum; // of this rank; empty: nobody has used the unit
    bool arrived = false;   // in this pass
    std::unique_ptr<Reduction> reduction;
    std::vector<float> expected; // of this rank's part
    bool is_used = false;        // by any rank
  };

  Step draw_step(int number);
  void run_step(const Step& step);
  /// Whether it was to fail, and has.
  bool train(const Step& step);
  void train_micro_batch(const Step& step, int micro_batch);
  void evaluate(int times, const Step& step);
  void write();

  // A region, as of a net.
  template <class Body>
  void in_region(const Step& step, int micro_batch, Body&& body);
  void open();
  void abandon(const std::string& reason);

  void read(size_t unit, const char* where);
  void backward(const Step& step, int micro_batch);
  void add_gradient(const Step& step, int micro_batch, size_t unit);
  void start_next();
  void start_reduction(size_t unit);
  void settle(const Step& step, int micro_batch);
  void check_gradients(const Step& step);
  void drop_gradients();

  bool uses(int rank, size_t unit, const Step& step, int micro_batch) const;
  void maybe_fail(const Step& step, int micro_batch, Place place) const;
  void pause();
  uint64_t draw(std::mt19937_64& random, uint64_t limit) const {
    return random() % limit;
  }
  size_t whole_numel(size_t unit) const {
    return kSliceNumel[unit] * static_cast<size_t>(world_.size());
  }
  std::string where() const;

  Communicator& world_;
  Settings settings_;
  std::shared_ptr<Communicator> gathers_;
  std::shared_ptr<Communicator> reductions_;
  std::shared_ptr<Communicator> reports_;
  std::unique_ptr<SharedWeights> weights_;
  std::mt19937_64 plan_; // the same on all ranks
  std::mt19937_64 own_;
  std::array<uint64_t, 3> epochs_{}; // of the communicators, in this region
  std::array<Gradients, kUnits> gradients_;
  size_t next_ = 0; // unit of those that are reduced in order
  bool settled_ = false;
  uint32_t version_ = 0; // of the weights
  int step_ = 0;
  int failed_steps_ = 0;
};

} // namespace fsdp::detail
