#pragma once

#include "layout/flat_layout.h"
#include "runtime/unit_storage.h"

#include <fsdp/communicator.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::detail {

class FlatGroup;

/// How a gradient is added to a .grad that is there: to the tensor itself, or
/// as a new one, so that the old one can be put back.
enum class Accumulate : uint8_t { kInPlace, kFresh };

/// The gradients of one flat group, from their arrival (whole, of this rank
/// alone) to the parameters' .grad (of the slice, of all ranks).
///
/// Gradients are collected in a buffer without gaps of the parameters that
/// require one. start_reduction() sends it off; what arrives later goes to a
/// fresh buffer and is reduced by itself. Results wait until assign().
class GroupGradients {
 public:
  GroupGradients(
      FlatGroup& group,
      std::shared_ptr<Communicator> reduce_communicator,
      double divide_factor);

  /// Adds a whole gradient. `gradient` may have any layout, also sparse.
  void add(int64_t index, const at::Tensor& gradient);

  /// Whether gradients have arrived that no reduction has taken.
  bool has_pending() const { return buffer_.defined(); }

  /// Whether every gradient of this backward pass that the last one brought has
  /// arrived.
  bool complete() const { return missing_ == 0; }

  /// Whether a reduction was started since the last assign() or drop().
  bool reduction_started() const { return reductions_ > 0; }

  /// Which parameters have got a gradient since the last assign() or drop().
  const std::vector<bool>& present() const { return present_; }
  void set_present(const std::vector<bool>& present) { present_ = present; }

  /// Sends off what has arrived; absent gradients count as zero. Collective
  /// over the reduce communicator.
  void start_reduction();

  /// Waits for the reductions that were started, or only for those that do not
  /// make this rank wait.
  void finish_reductions();
  void finish_ready_reductions();

  /// Sets or adds to .grad of the parameters that are present on some rank. The
  /// parameters are SHARDED. Later passes expect as many arrivals as this one.
  /// Returns the parameters that have got a gradient.
  std::vector<at::Tensor> assign(Accumulate accumulate);

  /// Throws when the .grad of a parameter has another size than its shard.
  void check_assignable() const;

  /// Forgets everything since the last assign().
  void drop();

  /// Bytes of whole, unreduced gradients.
  int64_t unreduced_bytes() const;

  /// At the start of a pass: takes over which parameters require a gradient
  /// now.
  void refresh_active();
  void forget_arrivals(); // of the pass; the buffer stays

 private:
  struct Reduction {
    at::Tensor input;  // keeps the buffer alive
    at::Tensor output; // this rank's part, or all of it when replicated
    std::unique_ptr<Work> work;
  };
  void allocate_buffer();
  void zero_absent();
  at::Tensor new_flat(int64_t numel, at::ScalarType dtype) const;
  void finish(Reduction& reduction);
  Interval part_of(int64_t index) const;
  void
  add_to_grad(int64_t index, const at::Tensor& flat, Accumulate accumulate);

  FlatGroup& group_;
  std::shared_ptr<Communicator> communicator_;
  double divide_factor_;

  std::vector<bool> active_;            // requires a gradient
  std::optional<CompactLayout> layout_; // of the active parameters
  at::Tensor buffer_; // 1-D, reduce dtype; undefined until a gradient arrives
  std::vector<bool> in_buffer_;
  std::vector<bool> present_;
  std::vector<int> arrivals_; // of this pass
  std::vector<int> expected_; // arrivals of the last pass
  int64_t missing_ = 0;       // sum of expected arrivals still to come
  std::vector<Reduction> in_flight_;
  int reductions_ = 0;
  at::Tensor result_;          // 1-D, sum of the finished reductions
  bool graph_dropped_ = false; // see UnitStorage
};

} // namespace fsdp::detail
