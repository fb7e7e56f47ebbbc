#pragma once

#include "layout/flat_layout.h"
#include "runtime/unit_storage.h"

#include <fsdp/communicator.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
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
/// Gradients stay where autograd has put them: start_reduction() sends them off
/// as pieces of one buffer, laid out as CompactLayout says, that never exists
/// in one place. What arrives later is reduced by itself. Results wait until
/// assign().
class GroupGradients {
 public:
  GroupGradients(FlatGroup& group, double divide_factor);

  /// Adds a whole gradient. `gradient` may have any layout, also sparse.
  void add(int64_t index, const at::Tensor& gradient);

  /// Whether gradients have arrived that no reduction has taken.
  bool has_pending() const { return pending_; }

  /// Whether every gradient of this backward pass that the last one brought has
  /// arrived.
  bool complete() const { return missing_ == 0; }

  /// Whether a reduction was started since the last assign() or drop().
  bool reduction_started() const { return reductions_ > 0; }

  /// Which parameters have got a gradient since the last assign() or drop().
  const std::vector<bool>& present() const { return present_; }
  void set_present(const std::vector<bool>& present) { present_ = present; }

  /// Sends off what has arrived; absent gradients count as zero. Collective
  /// over the ranks that share the unit.
  void start_reduction();

  /// The first reduction that was started: whether it makes this rank wait, and
  /// waiting for it. Where the shard has replicas this starts their average:
  /// all ranks finish reductions in the order in which they were started.
  bool is_ready();
  void finish_reduction();

  /// Waits for the averages over replicas.
  void finish_averages();

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
    std::vector<at::Tensor> inputs; // by parameter; kept alive
    at::Tensor output; // this rank's part, or all of it when replicated
    std::unique_ptr<Work> work;
  };
  bool is_local() const { return ranks_ == 1; }
  at::Tensor new_flat(int64_t numel, at::ScalarType dtype) const;
  std::vector<Piece> pieces_of(const std::vector<at::Tensor>& inputs) const;
  std::unique_ptr<Work> reduce(Reduction& reduction) const;
  /// Over the ranks that hold replicas of this rank's part.
  std::unique_ptr<Work> average(const at::Tensor& part) const;
  void keep(at::Tensor output);
  at::Tensor divided(at::Tensor gradient) const;
  void keep_local(std::vector<at::Tensor> inputs);
  Interval part_of(int64_t index) const;
  /// What is to become .grad of a parameter, or part of it.
  at::Tensor gradient_of(int64_t index) const;
  void add_to_grad(int64_t index, at::Tensor gradient, Accumulate accumulate)
      const;

  FlatGroup& group_;
  int ranks_; // all of whose gradients are joined
  double divide_factor_;
  ReduceOp op_; // a mean where the factor is the number of ranks

  std::vector<bool> active_;            // requires a gradient
  std::optional<CompactLayout> layout_; // of the active parameters
  /// By parameter: what has arrived and waits for a reduction; 1-D, in the
  /// reduce dtype.
  std::vector<at::Tensor> arrived_;
  bool pending_ = false; // some have
  std::vector<bool> present_;
  std::vector<int> arrivals_;       // of this pass
  std::vector<int> expected_;       // arrivals of the last pass
  int64_t missing_ = 0;             // sum of expected arrivals still to come
  std::deque<Reduction> in_flight_; // in the order in which they were started
  std::vector<Reduction> averaging_;
  int reductions_ = 0;
  at::Tensor result_;                     // 1-D, sum of the finished reductions
  std::vector<at::Tensor> local_results_; // of one rank: by parameter
  bool graph_dropped_ = false;            // see UnitStorage
};

} // namespace fsdp::detail
