#include <fsdp/touch.h>

#include "runtime/flat_group.h"
#include "runtime/net.h"
#include "runtime/touch.h"
#include "runtime/unit_storage.h"

namespace fsdp {

struct Touch::State {
  explicit State(detail::FlatGroup* group)
      : net(group->net().shared_from_this()),
        pins({group}) {}

  std::shared_ptr<detail::Net> net;
  detail::Pins pins;
};

Touch::Touch(std::unique_ptr<State> state) : state_(std::move(state)) {
}
Touch::Touch(Touch&&) noexcept = default;
Touch& Touch::operator=(Touch&&) noexcept = default;
Touch::~Touch() = default;

Touch touch(const at::Tensor& weight) {
  const auto* storage = detail::unit_storage(weight);
  if (storage == nullptr || storage->kind != detail::StorageKind::kWhole) {
    return Touch(nullptr);
  }
  auto* group = storage->tag->group.load();
  TORCH_CHECK_VALUE(
      group != nullptr && group->net().in_region(),
      "fsdp: touch of ",
      group == nullptr
          ? "a weight of a net that was destroyed."
          : "parameter '" + group->name_at(weight.storage_offset()) +
              "' outside of a region (" + group->net().rank_text() +
              "). Hold net.region().");
  return Touch(std::make_unique<Touch::State>(group));
}

} // namespace fsdp
