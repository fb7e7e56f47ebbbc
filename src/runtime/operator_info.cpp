#include "runtime/operator_info.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>

namespace fsdp::detail {

namespace {

template <size_t N>
bool contains(
    const std::array<std::string_view, N>& names,
    std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// They take a parameter and change or read its metadata only.
constexpr std::array<std::string_view, 18> kMetadataOnly = {
    "aten::_has_compatible_shallow_copy_type",
    "aten::_backward",
    "aten::set_data",
    "aten::requires_grad_",
    "aten::retain_grad",
    "aten::detach_",
    "aten::_version",
    "aten::is_leaf",
    "aten::output_nr",
    "aten::data",
    "aten::size",
    "aten::stride",
    "aten::numel",
    "aten::is_complex",
    "aten::is_floating_point",
    "aten::is_same_size",
    "aten::sym_size",
    "aten::record_stream"};

constexpr std::array<std::string_view, 14> kAllowedOnShard = {
    "aten::_has_compatible_shallow_copy_type",
    "aten::detach",
    "aten::detach_",
    "aten::alias",
    "aten::clone",
    "aten::to",
    "aten::_to_copy",
    "aten::contiguous",
    "aten::copy_",
    "aten::set_data",
    "aten::data",
    "aten::requires_grad_",
    "aten::is_leaf",
    "aten::_version"};

constexpr std::array<std::string_view, 5> kNeverCast = {
    "aten::type_as",
    "aten::to",
    "aten::_to_copy",
    "aten::result_type",
    "aten::copy_"};

constexpr std::array<std::string_view, 3> kNorms = {
    "aten::norm",
    "aten::linalg_vector_norm",
    "aten::_foreach_norm"};

constexpr std::array<std::string_view, 2> kConcatenations = {
    "aten::cat",
    "aten::concat"};

constexpr std::array<std::string_view, 6> kUpdates = {
    "aten::add_",
    "aten::sub_",
    "aten::mul_",
    "aten::lerp_",
    "aten::addcmul_",
    "aten::addcdiv_"};

// They take shape and type from a tensor, and no element.
constexpr std::array<std::string_view, 12> kFactories = {
    "aten::empty_like",
    "aten::zeros_like",
    "aten::ones_like",
    "aten::full_like",
    "aten::rand_like",
    "aten::randn_like",
    "aten::randint_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full"};

} // namespace

OperatorInfo::OperatorInfo(const c10::OperatorHandle& op)
    : name(op.schema().name()),
      repeatable(!op.hasTag(at::Tag::nondeterministic_seeded)) {
  const auto& schema = op.schema();
  for (const auto& argument : schema.arguments()) {
    const auto* alias = argument.alias_info();
    writes.push_back(alias != nullptr && alias->isWrite());
    writes_any = writes_any || writes.back();
  }
  const auto& returns = schema.returns();
  const bool returns_alias =
      std::any_of(returns.begin(), returns.end(), [](const auto& each) {
        return each.alias_info() != nullptr;
      });
  const bool factory = contains(kFactories, name);
  reads_nothing = (returns_alias && !writes_any) || factory ||
      contains(kMetadataOnly, name);
  allowed_on_shard = factory || contains(kAllowedOnShard, name);
  // Gradient formulas get what autograd saved: types that fit already, such as
  // statistics kept in float32.
  const bool never_cast =
      contains(kNeverCast, name) || name.find("_backward") != std::string::npos;
  for (size_t i = 0; i < writes.size(); ++i) {
    // Running statistics are written, though most schemas do not say so.
    const bool statistics =
        schema.arguments()[i].name().starts_with("running_");
    casts.push_back(!never_cast && !writes[i] && !statistics);
  }
  // Tensor::set_data dispatches nothing but this check (seen in 2.13).
  replaces_contents = name == "aten::set_data" ||
      name == "aten::_has_compatible_shallow_copy_type";
  is_norm = contains(kNorms, name);
  is_concatenation = contains(kConcatenations, name);
  is_update = contains(kUpdates, name);
}

const OperatorInfo& info_of(const c10::OperatorHandle& op) {
  static thread_local std::unordered_map<const void*, OperatorInfo> infos;
  const auto* key = &op.schema();
  const auto found = infos.find(key);
  return found != infos.end() ? found->second
                              : infos.try_emplace(key, op).first->second;
}

} // namespace fsdp::detail
