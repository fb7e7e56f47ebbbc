#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <string>

namespace fsdp::detail {

class FlatGroup;

/// Groups that are whole, and stay so, while one lives.
class Pins {
 public:
  explicit Pins(c10::SmallVector<FlatGroup*, 4> groups);
  ~Pins();
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;

 private:
  /// By net: most operators read weights of one.
  template <class F>
  void each_net(F&& visit);
  c10::SmallVector<FlatGroup*, 4> groups_;
  size_t pinned_ = 0; // the first of groups_ are
};

/// Whether `tensor` is a parameter of the group itself, no view of one.
bool is_parameter(const FlatGroup& group, const at::Tensor& tensor);

/// The parameter that `tensor`, a view of a slice, shows.
const std::string& shard_name(const FlatGroup& group, const at::Tensor& tensor);

/// The parameter whose .grad `tensor` is.
const std::string& gradient_name(
    const FlatGroup& group,
    const at::Tensor& tensor);

} // namespace fsdp::detail
