#include "comm/c10d_operation.h"

#include <algorithm>
#include <utility>

namespace fsdp::detail {

C10dOperation::C10dOperation(C10dPlan plan, uint64_t number, uint64_t hash)
    : plan_(std::move(plan)),
      number_(number),
      hash_(hash) {
  state_ = plan_.steps.empty() ? State::kDone : State::kUnfinished;
}

bool C10dOperation::advance(C10dTransport& transport) {
  update();
  while (state_ == State::kUnfinished && works_.empty()) {
    try {
      transport.enter(hash_);
      plan_.steps[next_step_++](transport, works_);
    } catch (const C10dMismatch&) {
      is_mismatch_ = true;
      fail(std::current_exception());
    } catch (...) {
      fail(std::current_exception());
    }
    update();
  }
  return state_ != State::kUnfinished || next_step_ == plan_.steps.size();
}

// The works of a step may fail one after the other; the memory is only free
// when all have ended.
void C10dOperation::update() {
  const auto is_complete = [](const auto& work) { return work->isCompleted(); };
  if (!std::all_of(works_.begin(), works_.end(), is_complete)) {
    return;
  }
  for (const auto& work : std::exchange(works_, {})) {
    if (!work->isSuccess()) {
      fail(work->exception());
    }
  }
  if (state_ == State::kUnfinished && next_step_ == plan_.steps.size()) {
    state_ = State::kDone;
  }
}

void C10dOperation::cancel(const std::string& reason) {
  if (state_ == State::kUnfinished) {
    state_ = State::kFailed;
    error_ = reason;
  }
}

void C10dOperation::fail(const std::exception_ptr& error) {
  if (state_ == State::kUnfinished) {
    state_ = State::kFailed;
    error_ = c10d_text_of(error);
  }
}

} // namespace fsdp::detail
