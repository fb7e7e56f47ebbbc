// Regions of a net: see [Note: Regions].

#include "runtime/net.h"

#include "runtime/arrival_hook.h"
#include "runtime/backward_engine.h"
#include "runtime/errors.h"
#include "runtime/involvement.h"
#include "runtime/recipe.h"

#include <utility>

namespace fsdp::detail {

void Net::check_may_enter() const {
  TORCH_CHECK_VALUE(
      !whole_open_,
      "fsdp: whole_parameters() is open (",
      rank_text(),
      "). Close it before the"
      " net is called; inside of it the module is an ordinary one:"
      " module->forward(x).");
  const bool nested = in_region() &&
      (owner_ == std::this_thread::get_id() || inside_backward_pass());
  TORCH_CHECK_VALUE(
      !in_region() || nested,
      "fsdp: a region of this net is open in another thread (",
      rank_text(),
      "). One net runs one forward or backward at a time.");
}

void Net::check_not_aborted() const {
  each_communicator([&](const Communicator& communicator) {
    const auto reason = communicator.aborted();
    TORCH_CHECK_WITH(
        DistBackendError,
        reason.empty(),
        "fsdp: this net can not be used any more (",
        rank_text(),
        "): ",
        reason);
  });
}

void Net::enter(RegionKind kind, bool accumulates) {
  const std::lock_guard lock(mutex_);
  if (remembered_error_) {
    std::rethrow_exception(std::exchange(remembered_error_, nullptr));
  }
  check_may_enter();
  go_on_after_failed_pass();
  if (depth_ == 0) {
    check_not_aborted();
    note_epochs();
    try {
      open(kind);
    } catch (const std::exception& error) {
      abandon(text_of(error));
      throw;
    }
  }
  const bool outermost = depth_++ == 0;
  if (kind == RegionKind::kBackward) {
    ran_backward_ = ran_backward_ || accumulates;
    accumulated_ = accumulated_ || accumulates;
    if (backward_depth_++ == 0) {
      each_group([](FlatGroup& group) { install_arrival_hooks(group); });
      set_gradients_aside();
      begin_pass(PassKind::kBackward);
    }
  } else if (outermost) {
    begin_pass(PassKind::kForward);
  }
}

void Net::open(RegionKind kind) {
  if (kind == RegionKind::kForward) {
    install_backward_engine();
    for (const auto& unit : units_) {
      if (!unit->stays_whole()) {
        unit->release(); // what was kept for a backward that never came
      }
    }
  }
  if (stale_) {
    // Shards may be empty here and written elsewhere, and gathers are for all.
    for (const auto& unit : units_) {
      if (unit->strategy == Strategy::kShardOptimizer) {
        unit->release();
      }
    }
  }
  // The optimizer's step may follow a pass that only evaluates.
  stale_ =
      stale_ && !(kind == RegionKind::kForward && at::GradMode::is_enabled());
  settled_ = false;
  // What may throw comes first: parameters are SHARDED until all is well.
  reducer_->begin_pass();
  take_up_replaced();
  publish_weights();
  each_group([](FlatGroup& group) { group.enter_region(); });
  owner_ = std::this_thread::get_id();
  records_graph_ = at::GradMode::is_enabled();
  region_thread_ = begin_region(weak_from_this());
  accumulated_ = false;
  ran_backward_ = false;
  broken_.reset();
}

void Net::take_up_replaced() {
  bool shared = false;
  each_group([&](const FlatGroup& group) {
    shared = shared || (group.is_shared() && group.has_replaced());
  });
  if (shared) {
    make_weights_writable("parameters that were replaced");
  }
  each_group([](FlatGroup& group) { group.adopt_replaced(); });
}

void Net::make_weights_writable(const char* what) {
  bool all_writable = true;
  each_shared([&](const SharedWeights& shared) {
    all_writable = all_writable && shared.is_writable();
  });
  if (all_writable) {
    return;
  }
  retire_weights();
  each_shared([&](SharedWeights& shared) {
    communicate([&] { shared.await_writable(what); });
  });
  each_group([](FlatGroup& group) { group.take_up_writes(); });
}

void Net::publish_weights() {
  bool all_published = true;
  each_shared([&](const SharedWeights& shared) {
    all_published = all_published && shared.is_published();
  });
  if (all_published) {
    return;
  }
  make_weights_writable("weights of the next step");
  each_group([](FlatGroup& group) { group.refresh_shared_slice(); });
  each_shared([](SharedWeights& shared) { shared.publish(); });
}

void Net::take_up_writes() {
  bool any = false;
  each_group([&](const FlatGroup& group) { any = any || group.has_writes(); });
  if (any) {
    make_weights_writable("weights that were written in a region");
  }
}

void Net::retire_weights() {
  each_group([](FlatGroup& group) {
    if (group.is_shared()) {
      group.discard();
    }
  });
  each_shared([](SharedWeights& shared) { shared.retire(); });
}

void Net::go_on_after_failed_pass() {
  // The exception was caught inside the region. Had it left the region too, it
  // would have been told once.
  if (std::exchange(pass_failed_, false)) {
    note_epochs();
  }
}

void Net::note_epochs_outside_of_regions() {
  if (depth_ == 0) {
    note_epochs();
  }
}

void Net::note_epochs() {
  epochs_.clear();
  each_communicator([&](Communicator& communicator) {
    epochs_.push_back(communicator.epoch());
  });
}

void Net::leave(RegionKind kind) {
  std::vector<at::Tensor> hooks_due;
  {
    const std::lock_guard lock(mutex_);
    const bool pass_ends =
        kind == RegionKind::kBackward && --backward_depth_ == 0;
    if (pass_ends) {
      put_gradients_back();
    }
    const bool outermost = --depth_ == 0;
    try {
      if (outermost) {
        close();
      } else if (pass_ends) {
        begin_pass(PassKind::kForward);
      }
      if (pass_ends && accumulated_) {
        settle_pass();
      }
      if (outermost && std::exchange(settled_, false)) {
        retire_weights();
        take_up_writes();
      }
    } catch (const std::exception& error) {
      if (outermost) {
        abandon(text_of(error));
      } else {
        fail_pass(text_of(error));
      }
      throw;
    }
    if (outermost) {
      gradients_before_.clear();
      hooks_due = std::exchange(hooks_due_, {});
    }
  }
  for (const auto& parameter : hooks_due) {
    run_replaced_hook(parameter); // not under the lock: it may use the net
  }
}

void Net::settle_pass() {
  accumulated_ = false;
  if (no_sync_ > 0) {
    reducer_->defer();
    return;
  }
  if (depth_ > 0) { // a forward region is open, and may still fail
    each_group([&](FlatGroup& group) {
      for (const auto& parameter : group.parameters()) {
        gradients_before_.emplace_back(
            parameter.tensor, parameter.tensor.grad());
      }
    });
  }
  reducer_->settle();
  settled_ = true;
  stale_ = true;
  const auto assigned =
      reducer_->assign(depth_ > 0 ? Accumulate::kFresh : Accumulate::kInPlace);
  hooks_due_.insert(hooks_due_.end(), assigned.begin(), assigned.end());
}

void Net::release_units() {
  const bool backward_may_follow = records_graph_ && !ran_backward_;
  schedule_->end_pass(); // what it releases is among the following
  for (const auto& unit : units_) {
    const bool kept = unit->stays_whole() ||
        (keeps_for_backward(unit->strategy) && backward_may_follow);
    if (kept) {
      unit->flush_writes();
    } else {
      unit->release(backward_may_follow ? KeepPart::kYes : KeepPart::kNo);
    }
  }
}

void Net::close() {
  forget_recipes();
  pass_failed_ = false;
  release_units();
  end_region(weak_from_this(), region_thread_);
  switch_back(Writes::kKeep);
  if (broken_) {
    TORCH_CHECK_WITH(DistBackendError, false, *broken_);
  }
}

void Net::switch_back(Writes writes) {
  std::exception_ptr error;
  each_group([&](FlatGroup& group) {
    try {
      group.leave_region(writes);
    } catch (const std::exception&) {
      error = std::current_exception(); // once all groups are SHARDED
    }
  });
  if (error) {
    std::rethrow_exception(error);
  }
}

void Net::fail(RegionKind kind, const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  const bool pass_ends =
      kind == RegionKind::kBackward && --backward_depth_ == 0;
  if (pass_ends) {
    put_gradients_back();
  }
  if (--depth_ > 0) {
    if (pass_ends) {
      fail_pass(reason);
    }
    return;
  }
  forget_recipes();
  pass_failed_ = false;
  end_region(weak_from_this(), region_thread_);
  switch_back(Writes::kDrop);
  put_assigned_back();
  hooks_due_.clear();
  abandon(reason);
}

// Of a backward pass inside of a region. The program may catch the exception
// there and go on: all ranks can, whatever failed on them.
void Net::fail_pass(const std::string& reason) {
  accumulated_ = false;
  tell_failure(reason); // first: then nobody waits for what is dropped
  reducer_->drop();
  // Ranks fail at different places, and so differ in what is whole.
  for (const auto unit : schedule_->fail_pass().release) {
    units_[unit]->release();
  }
  each_group([](FlatGroup& group) { group.drop_part(); });
  begin_pass(PassKind::kForward);
  broken_.reset();
  pass_failed_ = true;
}

void Net::abandon(const std::string& reason) {
  tell_failure(reason); // first: then nobody waits for what is dropped
  reducer_->drop();
  schedule_->reset();
  for (const auto& unit : units_) {
    unit->discard(); // also what is held: ranks may differ in what is whole
  }
  if (std::exchange(settled_, false)) {
    retire_weights();
  }
}

void Net::tell_failure(const std::string& reason) {
  // A failure that came from a peer has already ended the epoch.
  size_t next = 0;
  each_communicator([&](Communicator& communicator) {
    if (communicator.epoch() == epochs_.at(next++)) {
      communicator.signal_failure(reason);
    }
  });
}

void Net::remember_error(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  remembered_error_ = std::move(error);
}

void Net::set_gradients_aside() {
  gradients_aside_.clear();
  each_group([&](FlatGroup& group) {
    for (auto& parameter : group.parameters()) {
      gradients_aside_.push_back(std::move(parameter.tensor.mutable_grad()));
      parameter.tensor.mutable_grad() = at::Tensor();
    }
  });
}

void Net::put_assigned_back() {
  // The oldest last: what was there before the region.
  for (auto entry = gradients_before_.rbegin();
       entry != gradients_before_.rend();
       ++entry) {
    entry->first.mutable_grad() = entry->second;
  }
  gradients_before_.clear();
}

void Net::put_gradients_back() {
  size_t next = 0;
  each_group([&](FlatGroup& group) {
    for (auto& parameter : group.parameters()) {
      parameter.tensor.mutable_grad() = std::move(gradients_aside_[next++]);
    }
  });
  gradients_aside_.clear();
}

} // namespace fsdp::detail
