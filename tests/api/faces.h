#pragma once

#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace fsdp::testing {

struct Parts {
  at::Tensor left;
  std::vector<std::optional<at::Tensor>> right;
};

/// One linear layer with many faces.
struct FacesImpl : torch::nn::Module {
  FacesImpl() : linear(register_module("linear", torch::nn::Linear(3, 5))) {}

  at::Tensor forward(const at::Tensor& x, double scale = 1.0) {
    return linear(x) * scale;
  }
  at::Tensor forward(const std::vector<at::Tensor>& all) {
    return linear(torch::cat(all));
  }
  std::tuple<at::Tensor, int> forward(
      const at::Tensor& x,
      const std::string& label) {
    return {linear(x), static_cast<int>(label.size())};
  }
  Parts parts(const at::Tensor& x) {
    const auto y = linear(x);
    return {y.slice(1, 0, 2), {std::nullopt, y.slice(1, 2, 5)}};
  }
  at::Tensor consume(std::unique_ptr<at::Tensor> x) { return linear(*x); }
  std::unique_ptr<at::Tensor> boxed(const at::Tensor& x) {
    return std::make_unique<at::Tensor>(linear(x));
  }
  at::Tensor& cached(const at::Tensor& x) {
    last = linear(x);
    return last;
  }
  void remember(const at::Tensor& x) { last = linear(x); }
  void into(at::Tensor& result, const at::Tensor& x) { result = linear(x); }
  int64_t outputs() const { return linear->weight.size(0); }
  static at::Tensor twice(FacesImpl& self, const at::Tensor& x) {
    return 2 * self.linear(x);
  }

  torch::nn::Linear linear;
  at::Tensor last;
};
TORCH_MODULE(Faces);

inline auto make_faces() {
  return seeded([] { return std::make_shared<FacesImpl>(); });
}

inline void with_net(
    const std::function<
        void(FullyShardedDataParallel<FacesImpl>&, FacesImpl& plain)>& body) {
  on_ranks(3, [&](const World& world) {
    FullyShardedDataParallel net(make_faces(), world);
    body(net, *make_faces());
  });
}

inline void expect_near(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_TRUE(all_close(actual, expected, 1e-6, 1e-8));
}

} // namespace fsdp::testing
