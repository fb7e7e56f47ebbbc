#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace fsdp::detail {

/// What the fallback has to know of an operator, read from its schema once.
struct OperatorInfo {
  explicit OperatorInfo(const c10::OperatorHandle& op);

  std::string name;         // "aten::add_"
  std::vector<bool> writes; // by argument
  bool writes_any = false;

  /// Returns a view, or takes a parameter without reading its elements. What
  /// reads them later dispatches again.
  bool reads_nothing = false;

  /// May use a shard with autograd on: it shows or copies what is there.
  bool allowed_on_shard = false;

  /// By argument: may be cast to the unit's type.
  std::vector<bool> casts;

  /// The same arguments give the same values: it draws no random numbers.
  bool repeatable = true;

  /// Gives its first argument other contents.
  bool replaces_contents = false;

  /// Reads a gradient as a part of something global; on a shard that is wrong.
  bool is_norm = false;
  bool is_concatenation = false;

  /// Combines its first argument, in place, with others of the same shape.
  bool is_update = false;
};

/// The info of `op`; O(1) after the first call in this thread.
const OperatorInfo& info_of(const c10::OperatorHandle& op);

} // namespace fsdp::detail
