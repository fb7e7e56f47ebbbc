#pragma once

#include "comm/c10d_transport.h"
#include "comm/call.h"

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace fsdp::detail {

/// Thrown by a step that sees that the ranks call different things.
class C10dMismatch : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// How one call is carried out: steps, each of which is started when the works
/// of the one before are complete on this rank. Any thread may run a step.
struct C10dPlan {
  using Step = std::function<void(C10dTransport&, C10dWorks&)>;

  Call call;
  std::vector<Step> steps = {};
  /// Puts the result into the caller's memory; run by the rank that waits.
  std::function<void()> deliver = [] {};
  /// Whether works read or write the caller's memory.
  bool borrows = false;
};

/// One call of a rank. Guarded by the mutex of its group.
class C10dOperation {
 public:
  enum class State : uint8_t { kUnfinished, kDone, kFailed };

  C10dOperation(C10dPlan plan, uint64_t number, uint64_t hash);

  const Call& call() const { return plan_.call; }

  uint64_t number() const { return number_; }

  bool borrows() const { return plan_.borrows; }

  State state() const { return state_; }

  /// Why it failed.
  const std::string& error() const { return error_; }

  /// Whether the error is that ranks call different things.
  bool is_mismatch() const { return is_mismatch_; }

  /// Goes as far as possible without waiting. Returns whether nothing is left
  /// to start, so that the next operation may start.
  bool advance(C10dTransport& transport);

  /// Sees whether the works that are running are complete.
  void update();

  /// Starts no further step.
  void cancel(const std::string& reason);

  void deliver() const { plan_.deliver(); }

  /// Whether a work of it is in flight.
  bool is_running() const { return !works_.empty(); }

 private:
  void fail(const std::exception_ptr& error);

  C10dPlan plan_;
  uint64_t number_;
  uint64_t hash_;
  size_t next_step_ = 0;
  C10dWorks works_; // of the last step that was started
  State state_ = State::kUnfinished;
  std::string error_;
  bool is_mismatch_ = false;
};

} // namespace fsdp::detail
