#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

namespace fsdp::detail {

/// While one lives, operators of this thread are the library's own: the
/// dispatcher fallback lets them pass, nothing is recorded by autograd, and new
/// tensors are ordinary ones even when the program is in inference mode.
class InternalGuard {
 public:
  InternalGuard() : previous_(active_) { active_ = true; }
  ~InternalGuard() { active_ = previous_; }
  InternalGuard(const InternalGuard&) = delete;
  InternalGuard& operator=(const InternalGuard&) = delete;

  static bool active() { return active_; }

 private:
  inline static thread_local bool active_ = false;
  bool previous_;
  c10::InferenceMode ordinary_{false};
  at::NoGradGuard no_grad_;
};

} // namespace fsdp::detail
