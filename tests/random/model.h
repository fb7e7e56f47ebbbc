#pragma once

#include "random/spec.h"

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::random_models {

/// What a rank computes on in one micro-batch.
struct Batch {
  at::Tensor x;      // (rows, kInputs)
  at::Tensor ids;    // rows of embeddings
  at::Tensor target; // (rows, kOutputs)
  int step = 0;
  int rank = 0;
};

/// As a micro-batch: the batch that is evaluated after a step.
inline constexpr int kEvaluation = 9;

Batch make_batch(const Spec& spec, int step, int micro, int rank);

/// Where the model runs.
enum class Side : uint8_t {
  kSharded,
  kReference, // one model stands for all ranks, and casts weights itself
};

/// The model of a spec. Its values depend on the seed of the spec alone.
class Model : public torch::nn::Module {
 public:
  explicit Model(const Spec& spec, Side side = Side::kSharded);

  at::Tensor loss(const Batch& batch);

  /// Freezes and thaws layers.
  void begin_step(int step);

  /// Called with the index of each layer and its input, and with the number of
  /// layers before the loss.
  std::function<void(int, at::Tensor&)> before_layer;

  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  /// Each parameter once, with its first name.
  Named unique_parameters() const;
  /// All of them, also under a second name, in units.
  std::vector<std::pair<std::string, Named>> units() const;

 private:
  struct Layer {
    LayerSpec spec;
    std::shared_ptr<torch::nn::Module> module;
    std::vector<at::Tensor> parameters;
    at::Tensor running_mean, running_var;
  };

  void add_layer(size_t index, at::Generator& generator);
  at::Tensor run_layer(Layer& layer, const at::Tensor& x, const Batch& batch);
  at::Tensor run_kind(Layer& layer, const at::Tensor& x, const Batch& batch);
  at::Tensor
  run_linear(Layer& layer, const at::Tensor& x, const at::Tensor& bias) const;
  at::Tensor run_recurrent(Layer& layer, const at::Tensor& x) const;
  at::Tensor run_attention(Layer& layer, const at::Tensor& x) const;
  at::Tensor penalties() const;

  at::Tensor use(const at::Tensor& parameter) const;
  at::Tensor meet(const at::Tensor& x) const;
  at::Tensor
  linear(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) const;

  Spec spec_;
  Side side_;
  bool casts_; // weights and what meets them, to 16 bits
  std::vector<Layer> layers_;
  at::Tensor head_;
};

/// Repeats or drops columns.
at::Tensor fit(const at::Tensor& x, int64_t columns);

/// f(x), computed again in backward instead of kept.
at::Tensor checkpoint(
    std::function<at::Tensor(const at::Tensor&)> f,
    const at::Tensor& x);

/// x w^T by a custom autograd function.
at::Tensor custom_linear(const at::Tensor& x, const at::Tensor& w);

} // namespace fsdp::random_models
