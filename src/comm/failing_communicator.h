#pragma once

#include <fsdp/communicator.h>

#include <memory>
#include <string>

namespace fsdp::detail {

/// Which calls of a FailingCommunicator fail, and how.
struct FailurePlan {
  enum class Moment { kIssue, kWait };

  std::string what;    // calls whose `what` contains this are counted
  int nth = 1;         // the first of them that fails, from 1
  bool repeat = false; // whether all after it fail too
  Moment moment = Moment::kIssue;
  std::string text = "injected failure";
};

/// Passes every call on to `inner`, but fails some as a broken connection
/// would: the failure ends the epoch (the peers get `text` by
/// inner->signal_failure) and this rank throws CommunicationError(text). At
/// kIssue the call does not reach `inner`; at kWait it does, and the failure
/// comes from wait() (for barrier, exchange and split: after the peers came).
/// The `what` of a split is "split". Communicators that a split returns never
/// fail by plan.
std::shared_ptr<Communicator> make_failing_communicator(
    std::shared_ptr<Communicator> inner,
    FailurePlan plan);

} // namespace fsdp::detail
