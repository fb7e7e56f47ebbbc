#include "api/unit_marks.h"

#include <fsdp/fully_shard.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace fsdp::detail {

namespace {

/// Marks of modules that no net has taken yet. A module cannot carry one
/// itself; a weak pointer, unlike an address, does not outlive its module.
class UnitMarks {
 public:
  void add(
      const std::shared_ptr<torch::nn::Module>& module,
      const UnitOptions& options) {
    const std::lock_guard lock(mutex_);
    std::erase_if(
        marks_, [](const Mark& mark) { return mark.module.expired(); });
    const bool marked =
        std::any_of(marks_.begin(), marks_.end(), [&](const Mark& mark) {
          return mark.module.lock() == module;
        });
    TORCH_CHECK_VALUE(
        !marked,
        "fsdp: fully_shard: this ",
        module->name(),
        " is marked as a unit"
        " already. Call it once per module.");
    marks_.push_back({module, options});
  }

  std::optional<UnitOptions> take(const torch::nn::Module& module) {
    const std::lock_guard lock(mutex_);
    const auto mark =
        std::find_if(marks_.begin(), marks_.end(), [&](const Mark& each) {
          return each.module.lock().get() == &module;
        });
    if (mark == marks_.end()) {
      return std::nullopt;
    }
    const auto options = mark->options;
    marks_.erase(mark);
    return options;
  }

 private:
  struct Mark {
    std::weak_ptr<torch::nn::Module> module;
    UnitOptions options;
  };
  std::mutex mutex_;
  std::vector<Mark> marks_;
};

UnitMarks& unit_marks() {
  static auto* marks = new UnitMarks; // safe in any order of destruction
  return *marks;
}

} // namespace

void mark_unit(
    const std::shared_ptr<torch::nn::Module>& module,
    const UnitOptions& options) {
  TORCH_CHECK_VALUE(
      module != nullptr, "fsdp: fully_shard: the module is null.");
  unit_marks().add(module, options);
}

std::optional<UnitOptions> take_mark(const torch::nn::Module& module) {
  return unit_marks().take(module);
}

} // namespace fsdp::detail
