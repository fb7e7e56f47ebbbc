#pragma once

#include "harness/failing_world.h"
#include "harness/tanh_layers.h"

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace fsdp::testing {

/// Where a model throws.
enum class Place : uint8_t {
  kNowhere,
  kForward,        // before a layer
  kFunction,       // in the backward of a custom function after a layer
  kActivationHook, // of the output of a layer
  kParameterHook,  // of the weight of a layer
  kAfterBackward,  // a backward in the region had succeeded
};

/// Layers that throw where they are told to.
struct BreakableLayers : TanhLayers {
  Place place = Place::kNowhere;
  size_t layer = 0;
  std::string text;
  bool backward_in_region = false;

  BreakableLayers();
  BreakableLayers(const BreakableLayers&) = delete;
  BreakableLayers& operator=(const BreakableLayers&) = delete;

  at::Tensor loss(const at::Tensor& rows);

 private:
  bool breaks(Place at, size_t index) const {
    return place == at && layer == index;
  }
};

/// One rank, before an attempt that must fail.
struct Breaking {
  BreakableLayers& model;
  Injection& injection;
  int rank;
  int world_size;
  int attempt; // counts all failed attempts
  /// In this attempt alone.
  std::string text;
};
using Break = std::function<void(Breaking&)>;

struct FailureSettings {
  int steps = 3;
  /// How many attempts fail in a row: before the first pass of each step, and
  /// again when that has left gradients.
  int failures = 1;
  Batch batch = Batch::kSplit;
};

/// Trains with passes that `breaks` makes fail on some ranks: every rank must
/// get an exception with the attempt's text, and find everything as it was
/// before the attempt. Then the pass is done again. With a null `breaks`
/// nothing fails. Returns what the ranks see that run in this process, by rank.
std::map<int, Training> train_with_failures(
    int world_size,
    Strategy strategy,
    const Break& breaks,
    const FailureSettings& settings = {});

/// The training with failures gives the bits of one without.
void expect_failures_leave_no_trace(
    const std::vector<int>& world_sizes,
    const std::vector<Strategy>& strategies,
    const Break& breaks,
    const FailureSettings& settings = {});

/// What a rank holds, to see later that it holds the same.
class Snapshot {
 public:
  explicit Snapshot(ShardedTensors& net);
  /// Expects the values, shapes and gradients of then, and nothing gathered.
  void expect_unchanged(ShardedTensors& net) const;

 private:
  struct State {
    at::Tensor value;
    at::Tensor gradient; // the tensor itself
    at::Tensor gradient_value;
  };
  std::vector<State> states_;
};

/// One rank's net of layers that break.
struct BreakableRank {
  BreakableRank(const World& world, Strategy strategy)
      : net(m->units(), world, Options().strategy(strategy)) {}

  void pass() {
    net.call([&] { return m->loss(torch::arange(kRows)); }).backward();
  }
  void expect_pass_works();

  std::shared_ptr<BreakableLayers> m = build_model<BreakableLayers>();
  ShardedTensors net;
};

} // namespace fsdp::testing
