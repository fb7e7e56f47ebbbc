#include "runtime/view_base.h"

#include <torch/csrc/autograd/variable.h>

namespace fsdp::detail {

namespace {

/// The base that the autograd metadata of a view holds, if it is its only user.
at::Tensor private_base(const at::Tensor& tensor) {
  auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (view == nullptr) {
    return {};
  }
  at::Tensor base;
  if (view->has_bw_view()) {
    base = view->get_backward_view().base_;
  } else if (view->has_fw_view()) {
    base = view->get_forward_view().base_;
  }
  // Views may share what they know of their base: count handles, not places.
  constexpr size_t kMine = 1;
  const size_t held_by_view = view->shared_view_info()
      ? 1
      : (view->has_bw_view() ? 1 : 0) + (view->has_fw_view() ? 1 : 0);
  return base.defined() && base.use_count() <= kMine + held_by_view
      ? base
      : at::Tensor();
}

} // namespace

bool is_sole_user_of_storage(const at::Tensor& tensor) {
  const auto base = private_base(tensor);
  const bool shared_with_base = base.defined() && base.is_alias_of(tensor);
  return tensor.storage().use_count() <= (shared_with_base ? 2U : 1U);
}

} // namespace fsdp::detail
