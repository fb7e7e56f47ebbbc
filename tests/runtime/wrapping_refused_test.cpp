// What cannot be sharded rightly is refused when the net is made, by name and
// on all ranks, and leaves the model as it was.

#include "harness/chain.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;
using at::Tensor;

/// What the program holds beside the parameters, by rank.
thread_local Tensor held;

/// On every rank: sharding `make()` is refused with `parts`; the tensors stay
/// whole.
void expect_refused(
    const std::function<NamedUnits()>& make,
    const std::vector<std::string>& parts) {
  for (const int world_size : {1, 2, 4}) {
    run_ranks(
        world_size,
        [&](const World& world) {
          const auto units = build([&] {
                               return TestModel{make(), {}, {}};
                             }).units;
          std::vector<Tensor> before;
          for (const auto& [name, tensor] : units[0].second) {
            before.push_back(tensor.detach().clone());
          }
          EXPECT_TRUE(fails_with(
              [&] { const ShardedTensors net(units, world); }, parts));
          held.reset();
          for (size_t i = 0; i < before.size(); ++i) {
            EXPECT_TRUE(at::equal(units[0].second[i].second, before[i])) << i;
          }
        },
        kWaitLimit);
  }
}

TEST(Wrapping, TensorsThatAreTiedThroughStorageAreRefusedByBothNames) {
  expect_refused(
      [] {
        nn::Embedding embedding(10, 16);
        nn::Linear head(nn::LinearOptions(16, 10).bias(false));
        head->weight.set_data(embedding->weight.data());
        return NamedUnits{
            {"embedding", {{"embedding.weight", embedding->weight}}},
            {"head", {{"head.weight", head->weight}}}};
      },
      {"'embedding.weight'",
       "'head.weight'",
       "share one storage",
       "Register the same tensor at both places"});
}

TEST(Wrapping, OneTensorUnderTwoNamesIsTied) {
  ParitySettings settings;
  expect_same_training(
      [] {
        auto embedding = std::make_shared<nn::Embedding>(10, 16);
        const auto weight = (*embedding)->weight;
        const auto rows_seen = torch::arange(kRows) % 10;
        return TestModel{
            {{"embedding", {{"embedding.weight", weight}}},
             {"head", {{"head.weight", weight}}}},
            [embedding, weight, rows_seen](const Tensor& rows) {
              const auto words = rows_seen.index_select(0, rows);
              const auto scores =
                  torch::linear((*embedding)->forward(words), weight);
              return nn::functional::cross_entropy(scores, words);
            },
            embedding};
      },
      settings);
}

TEST(Wrapping, ViewThatSomebodyHoldsIsRefusedByName) {
  expect_refused(
      [] {
        auto weight = torch::randn({16, 16}).requires_grad_();
        held = weight.detach().t();
        return NamedUnits{{"unit", {{"unit.weight", weight}}}};
      },
      {"somebody else holds a view of parameter 'unit.weight'",
       "after sharding",
       "clone()"});
}

TEST(Wrapping, ParameterThatIsAViewIsRefusedByName) {
  expect_refused(
      [] {
        held = torch::randn({4, 16, 16});
        auto weight = held[1].detach().requires_grad_();
        return NamedUnits{{"unit", {{"unit.weight", weight}}}};
      },
      {"somebody else holds a view of parameter 'unit.weight'"});
}

TEST(Wrapping, ParameterOnOneOfTwoNetsIsRefused) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(
        world_size,
        [](const World& world) {
          const auto chain = build_chain();
          ShardedTensors net(chain->units(), world);
          EXPECT_TRUE(fails_with(
              [&] { const ShardedTensors again(chain->units(), world); },
              {"'layer0.weight'", "is sharded already"}));
          const auto loss =
              net.call([&] { return chain->loss(rows_of_rank(world)); });
          loss.backward();
          EXPECT_TRUE(chain->weight(3).grad().defined());
        },
        kWaitLimit);
  }
}

TEST(Wrapping, ParameterThatAutogradComputedIsRefusedByName) {
  expect_refused(
      [] {
        auto weight = torch::randn({16, 16}).requires_grad_() * 2;
        return NamedUnits{{"unit", {{"unit.weight", weight}}}};
      },
      {"'unit.weight'", "must be a leaf", "detach()"});
}

TEST(Wrapping, ParameterThatHasAGradientIsRefusedByName) {
  expect_refused(
      [] {
        auto weight = torch::randn({16, 16}).requires_grad_();
        weight.pow(2).sum().backward();
        return NamedUnits{{"unit", {{"unit.weight", weight}}}};
      },
      {"'unit.weight'", "has a gradient already", "zero_grad()"});
}

TEST(Wrapping, SparseParameterIsRefusedByName) {
  const auto weight = torch::eye(4).to_sparse().requires_grad_();
  EXPECT_TRUE(fails_with(
      [&] {
        const ShardedTensors net({{"unit", {{"unit.weight", weight}}}});
      },
      {"'unit.weight'", "must be a dense tensor", "Sparse"}));
}

} // namespace
} // namespace fsdp::testing
