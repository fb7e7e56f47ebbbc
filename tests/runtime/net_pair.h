#pragma once

#include "harness/chain.h"

#include <memory>
#include <utility>
#include <vector>

namespace fsdp::testing {

/// Two nets, sharded or plain.
struct Pair {
  explicit Pair(const World* world, Strategy strategy = Strategy::kFullShard)
      : first(build_chain(2)),
        second(build_chain(3)) {
    if (world != nullptr) {
      const auto options = Options().strategy(strategy);
      first_net =
          std::make_unique<ShardedTensors>(first->units(), *world, options);
      second_net =
          std::make_unique<ShardedTensors>(second->units(), *world, options);
    }
  }

  template <class F>
  static at::Tensor call(
      const std::unique_ptr<ShardedTensors>& net,
      F&& function) {
    return net ? net->call(function) : function();
  }
  template <class F>
  at::Tensor call_first(F&& function) {
    return call(first_net, std::forward<F>(function));
  }
  template <class F>
  at::Tensor call_second(F&& function) {
    return call(second_net, std::forward<F>(function));
  }

  /// Whole parameters of both.
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> values;
    for (const auto* chain : {first.get(), second.get()}) {
      const auto& net = chain == first.get() ? first_net : second_net;
      if (net) {
        for (auto& [name, value] : whole_values(*net)) {
          values.push_back(value);
        }
      } else {
        for (const auto& value : chain->parameters()) {
          values.push_back(value.detach().clone());
        }
      }
    }
    return values;
  }

  std::shared_ptr<Chain> first;
  std::shared_ptr<Chain> second;
  std::unique_ptr<ShardedTensors> first_net;
  std::unique_ptr<ShardedTensors> second_net;
};

/// Whether a weight shows its shard.
inline bool is_sharded(const at::Tensor& weight) {
  return weight.dim() == 1;
}

} // namespace fsdp::testing
