#include "harness/outcome.h"

#include "runtime/errors.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <stdexcept>

namespace fsdp::testing {

namespace {

Outcome outcome_of_exception() {
  const auto error = std::current_exception();
  try {
    throw;
  } catch (const c10::DistBackendError& news) {
    return {Outcome::Kind::kConsequence, detail::text_of(news), error};
  } catch (const CommunicationError& news) {
    return {Outcome::Kind::kConsequence, news.what(), error};
  } catch (const std::exception& cause) {
    return {Outcome::Kind::kCause, detail::text_of(cause), error};
  } catch (...) {
    return {Outcome::Kind::kCause, "an exception of an unknown type", error};
  }
}

[[noreturn]] void rethrow(const Outcome& outcome) {
  if (outcome.error != nullptr) {
    std::rethrow_exception(outcome.error);
  }
  TORCH_CHECK_WITH(
      DistBackendError,
      outcome.kind != Outcome::Kind::kConsequence,
      outcome.text);
  throw std::runtime_error(outcome.text);
}

} // namespace

Outcome run_rank(
    const World& world,
    const std::function<void(const World&)>& rank_main) {
  Outcome outcome;
  try {
    rank_main(world);
  } catch (...) {
    outcome = outcome_of_exception();
  }
  if (outcome.kind != Outcome::Kind::kDone) {
    try {
      world.communicator().signal_failure(outcome.text);
    } catch (const c10::DistBackendError&) {
      // It has shut its world down, which the peers know already.
    }
  }
  return outcome;
}

void rethrow_first(const std::vector<Outcome>& by_rank) {
  for (const auto kind : {Outcome::Kind::kCause, Outcome::Kind::kConsequence}) {
    const auto found =
        std::find_if(by_rank.begin(), by_rank.end(), [&](const auto& each) {
          return each.kind == kind;
        });
    if (found != by_rank.end()) {
      rethrow(*found);
    }
  }
}

} // namespace fsdp::testing
