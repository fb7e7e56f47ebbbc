// Embeddings: padding, bags, sparse gradients, rows renormalised in place.

#include "harness/grouping.h"
#include "harness/mixed_precision.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace embedding {
namespace {

namespace nn = torch::nn;
using at::Tensor;

constexpr int64_t kWords = 11;
constexpr int64_t kWidth = 9;

/// The words of each row, and bags of them in one of the three modes.
MakeModel bag(nn::EmbeddingBagOptions options) {
  return [options] {
    nn::EmbeddingBag module(options);
    const auto words = torch::randint(0, kWords, {kRows, 4});
    return model_of(
        unit_per_parameter({{"bag", module.ptr()}}),
        [=](const Tensor& rows) mutable {
          const auto some = words.index_select(0, rows).reshape({-1});
          const auto offsets = torch::arange(rows.numel()) * 4;
          return module(some, offsets).pow(2).mean();
        });
  };
}

TEST(EmbeddingParity, BagOfSums) {
  expect_same_training_in_both_types(
      bag(nn::EmbeddingBagOptions(kWords, kWidth).mode(torch::kSum)));
}

TEST(EmbeddingParity, BagOfMeans) {
  expect_same_training_in_both_types(
      bag(nn::EmbeddingBagOptions(kWords, kWidth).mode(torch::kMean)));
}

TEST(EmbeddingParity, BagOfMaxima) {
  expect_same_training_in_both_types(
      bag(nn::EmbeddingBagOptions(kWords, kWidth).mode(torch::kMax)));
}

MakeModel embedding_and_linear(nn::EmbeddingOptions options) {
  return [options] {
    nn::Embedding embedding(options);
    nn::Linear linear(kWidth, 5);
    const auto words = torch::randint(0, kWords, {kRows});
    return model_of(
        unit_per_parameter(
            {{"embedding", embedding.ptr()}, {"linear", linear.ptr()}}),
        [=](const Tensor& rows) mutable {
          return linear(embedding(words.index_select(0, rows))).pow(2).mean();
        });
  };
}

TEST(EmbeddingParity, PaddingIndex) {
  expect_same_training_in_both_types(embedding_and_linear(
      nn::EmbeddingOptions(kWords, kWidth).padding_idx(2)));
}

TEST(
    EmbeddingParity,
    RowsRenormalisedInPlace) { // max_norm writes to the weight
  expect_same_training_in_both_types(
      embedding_and_linear(nn::EmbeddingOptions(kWords, kWidth).max_norm(1.0)),
      same_batch());
}

TEST(EmbeddingParity, SparseGradientsTrainAsDenseOnes) {
  ParitySettings settings;
  const auto expected = train_unsharded(
      embedding_and_linear(nn::EmbeddingOptions(kWords, kWidth)), settings);
  expect_same_training_as(
      expected,
      embedding_and_linear(nn::EmbeddingOptions(kWords, kWidth).sparse(true)),
      settings);
}

TEST(EmbeddingParity, SparseGradientsBecomeDense) {
  run_ranks(
      2,
      [](const World& world) {
        const auto model = build(embedding_and_linear(
            nn::EmbeddingOptions(kWords, kWidth).sparse(true)));
        ShardedTensors net(model.units, world);
        net.call([&] { return model.loss(torch::arange(kRows)); }).backward();
        const auto gradient = net.parameters().front().grad();
        EXPECT_EQ(gradient.layout(), c10::kStrided);
        EXPECT_EQ(gradient.sizes(), net.parameters().front().sizes());
      },
      std::chrono::seconds(20));
}

} // namespace
} // namespace embedding
} // namespace fsdp::testing
