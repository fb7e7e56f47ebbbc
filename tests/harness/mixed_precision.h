#pragma once

#include "harness/parity.h"

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {

/// The type that the parameter of this name computes in; nothing: its own.
using ComputeType =
    std::function<std::optional<at::ScalarType>(const std::string& name)>;

/// Mixed precision by hand, without the library: an optimizer trains "masters"
/// in the type that the model was built with, and the model computes with
/// copies in another. Types other than floating point ones are left alone.
class MasterWeights {
 public:
  MasterWeights(
      const std::vector<std::pair<std::string, at::Tensor>>& parameters,
      const ComputeType& compute_type);

  /// Before a step: parameters become copies of the masters.
  void hand_out();

  /// After backward: masters get the gradients, and what the model wrote to its
  /// parameters.
  void take_back();

  std::vector<at::Tensor> masters() const;

  /// The values of the masters by name.
  std::vector<std::pair<std::string, at::Tensor>> values() const;

 private:
  struct Weight {
    std::string name;
    at::Tensor parameter;
    at::Tensor master; // the parameter itself when nothing is cast
    at::ScalarType compute_type;

    bool is_cast() const { return !master.is_same(parameter); }
  };
  std::vector<Weight> weights_;
};

/// Trains unsharded, with masters, and sharded with MixedPrecision, computing
/// in bfloat16 and reducing in float32, in every world and strategy of
/// `settings`. All ranks take the same batch: sums of bfloat16 gradients are
/// exact then, so the tolerances are those of float32. The model must run with
/// bfloat16 parameters by itself.
void expect_same_training_in_bfloat16(
    const MakeModel& make,
    ParitySettings settings = {});

/// The same where the model must not be the same: `make_with_casts` casts by
/// itself what the library casts for `make`.
void expect_same_training_in_bfloat16_as(
    const MakeModel& make_with_casts,
    const MakeModel& make,
    ParitySettings settings = {});

/// The first of these, and expect_same_training() in float32.
void expect_same_training_in_both_types(
    const MakeModel& make,
    const ParitySettings& settings = {});

} // namespace fsdp::testing
