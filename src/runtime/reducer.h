#pragma once

#include "runtime/group_gradients.h"
#include "schedule/reduction_order.h"

#include <fsdp/communicator.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::detail {

/// Reduces the gradients of a net.
///
/// [Note: Order of reductions] Reductions are collective, so all ranks start
/// them in one agreed order: at first the reverse order of registration, later
/// the order in which rank 0's gradients were complete in the last pass. A
/// group whose turn has come, and whose gradients have arrived, is sent off
/// while backward goes on. What is left is settled at the end of the pass:
/// ranks tell each other which groups they have started and which parameters
/// have gradients, the agreed order is completed (a rank without gradients adds
/// zeros), then late arrivals follow in order of registration. So ranks may use
/// different parameters: one that no rank used keeps an undefined gradient, one
/// that some rank used gets the mean over all ranks.
class Reducer {
 public:
  /// Reports go over a communicator of their own: a rank may send its report
  /// before or after reductions that the others start early.
  Reducer(
      const std::vector<FlatGroup*>& groups,
      std::shared_ptr<Communicator> report_communicator,
      double divide_factor);

  /// A pass begins (the outermost region opens).
  void begin_pass();

  /// A whole gradient of parameter `index` of group `group` has arrived.
  /// `may_start`: gradients are reduced at the end of this pass.
  void
  add(size_t group, int64_t index, const at::Tensor& gradient, bool may_start);

  /// Ends a pass that is not reduced: gradients wait for the next one.
  void defer();

  /// Ends a pass: reduces everything. When it returns, no rank can fail this
  /// pass any more. Collective.
  void settle();

  /// Assigns what settle() has reduced to .grad. Returns the parameters that
  /// have got a gradient.
  std::vector<at::Tensor> assign(Accumulate accumulate);

  /// Ends a pass that failed: forgets all gradients that were not assigned, and
  /// what the ranks have agreed on. When gradients of earlier passes are among
  /// them, the next begin_pass() says so: ranks may have failed at different
  /// places, so that nobody can know what of them is left elsewhere.
  void drop();

  /// The program gives up what waits for a reduction, and knows.
  void give_up() {
    drop();
    lost_ = false;
  }

  bool has_pending() const;
  int64_t unreduced_bytes() const;

 private:
  struct Report; // what a rank tells the others when it settles
  std::string encode_report() const;
  std::vector<Report> exchange_reports();
  void start_over();
  void start(size_t group);
  void finish_first();
  void start_next();
  void start_agreed(const std::vector<Report>& reports);
  void start_late(const std::vector<Report>& reports);
  std::vector<uint32_t> proposed_order() const;

  std::shared_ptr<Communicator> report_communicator_;
  std::deque<GroupGradients> gradients_; // by group
  ReductionOrder order_;
  std::deque<size_t> started_; // groups whose reduction is not finished
  bool deferred_ = false;      // gradients of earlier passes wait
  bool lost_ = false;          // they were dropped, and nobody knows yet
};

} // namespace fsdp::detail
