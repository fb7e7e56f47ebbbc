#include "runtime/shard_place.h"

#include "runtime/flat_group.h"
#include "runtime/net.h"
#include "runtime/touch.h"
#include "runtime/unit_storage.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

namespace fsdp::detail {

FlatGroup* group_of_shard(const at::Tensor& tensor) {
  const auto* storage = unit_storage(tensor);
  return storage != nullptr && storage->kind == StorageKind::kShard
      ? storage->tag->group.load()
      : nullptr;
}

bool is_whole_in_region(const at::Tensor& tensor) {
  const auto* storage = unit_storage(tensor);
  return storage != nullptr && storage->kind == StorageKind::kWhole;
}

bool share_gradient_buffer(const at::Tensor& a, const at::Tensor& b) {
  const auto* storage = unit_storage(a);
  return storage != nullptr && storage->kind == StorageKind::kGradient &&
      storage == unit_storage(b);
}

std::string parameter_text(const at::Tensor& parameter) {
  const auto* storage = unit_storage(parameter);
  const auto* group = storage == nullptr ? nullptr : storage->tag->group.load();
  return group == nullptr ? c10::str("a parameter of shape ", parameter.sizes())
                          : c10::str(
                                "parameter '",
                                shard_name(*group, parameter),
                                "' (",
                                group->net().rank_text(),
                                ")");
}

at::Tensor memory_from(const at::Tensor& tensor, int64_t numel) {
  const int64_t width = tensor.is_complex() ? 2 : 1;
  return tensor_on_storage_of(
      tensor,
      c10::toRealValueType(tensor.scalar_type()),
      {numel * width},
      tensor.storage_offset() * width);
}

void bump_version(const at::Tensor& parameter) {
  if (!parameter.is_inference()) { // those have no version
    torch::autograd::impl::bump_version(parameter);
  }
}

} // namespace fsdp::detail
