#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::detail {

/// The order in which all ranks start the reductions of flat groups: at first
/// the reverse order of registration, later the order in which rank 0's
/// gradients were complete in the last pass. Groups are named by their index in
/// the order of registration.
class ReductionOrder {
 public:
  explicit ReductionOrder(size_t groups);

  /// A pass begins: it is the turn of the first group again.
  void start_over();

  /// The gradients of `group` are complete in this pass on this rank.
  void completed(uint32_t group);

  /// The group whose reduction all ranks start next; nothing when all have had
  /// their turn.
  std::optional<uint32_t> turn() const;

  /// The group whose turn it is has been started. Throws std::logic_error when
  /// it is nobody's turn.
  void started_turn();

  /// What the ranks have agreed on. Groups that no gradient reached in the pass
  /// it comes from are not in it.
  const std::vector<uint32_t>& agreed() const { return agreed_; }
  bool has(uint32_t group) const { return has_.at(group); }

  /// The order that this rank proposes for the next pass: as groups were
  /// completed, then the others that had gradients, in order of registration.
  /// `had_gradients` has an entry per group.
  std::vector<uint32_t> proposed(const std::vector<bool>& had_gradients) const;

  /// Takes over the order of rank 0, the same on all ranks. The turn stays
  /// where it is until start_over(). Throws std::invalid_argument when an entry
  /// is not a group, or is there twice.
  void agree(std::vector<uint32_t> order);

  /// A pass failed: ranks may not have agreed on the same, so the first order
  /// holds again.
  void forget();

 private:
  void set_agreed(std::vector<uint32_t> order);

  std::vector<uint32_t> agreed_;
  std::vector<bool> has_;           // by group: in agreed_
  std::vector<uint32_t> completed_; // in this pass, in order
  std::vector<bool> is_completed_;  // by group
  size_t next_ = 0;                 // in agreed_
};

} // namespace fsdp::detail
