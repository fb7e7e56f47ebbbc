// Operators that read several weights at once, each in a unit of its own.

#include "harness/grouping.h"
#include "harness/mixed_precision.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace operators {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using at::Tensor;

TEST(OperatorParity, AttentionOverSlicesOfOneWeight) {
  expect_same_training_in_both_types([] {
    nn::Linear inputs(16, 48);
    nn::Linear output(16, 16);
    const auto x = torch::randn({kRows, 6, 16});
    return model_of(
        unit_per_parameter(
            {{"inputs", inputs.ptr()}, {"output", output.ptr()}}),
        [=](const Tensor& rows) mutable {
          const auto weights = inputs->weight.chunk(3, 0);
          const auto biases = inputs->bias.chunk(3, 0);
          const auto y = cast_like(x.index_select(0, rows), weights[0]);
          const auto heads = [&](int i) {
            return F::linear(y, weights[i], biases[i])
                .view({-1, 6, 4, 4})
                .transpose(1, 2);
          };
          const auto attended = at::scaled_dot_product_attention(
              heads(0),
              heads(1),
              heads(2),
              /*attn_mask=*/{},
              /*dropout_p=*/0.0,
              /*is_causal=*/true);
          return output(attended.transpose(1, 2).reshape({-1, 6, 16}))
              .pow(2)
              .mean();
        });
  });
}

TEST(OperatorParity, AttentionWithAParameterAsItsMask) {
  const auto make = [] {
    const auto mask = random_parameter({1, 2, 6, 6});
    const auto query = random_parameter({1, 2, 6, 8});
    return model_of(
        unit_per_tensor({{"mask", mask}, {"query", query}}),
        [=](const Tensor&) {
          return at::scaled_dot_product_attention(query, query, query, mask)
              .pow(2)
              .mean();
        });
  };
  expect_same_training_in_both_types(make, same_batch());
}

TEST(OperatorParity, AttentionOfLearnedQueries) {
  expect_same_training_in_both_types([] {
    const auto queries = random_parameter({2, 6, 8});
    nn::Linear keys(5, 16);
    const auto x = torch::randn({kRows, 7, 5});
    auto units = unit_per_parameter({{"keys", keys.ptr()}});
    units.emplace_back("queries", NamedTensors{{"queries", queries}});
    return model_of(units, [=](const Tensor& rows) mutable {
      const auto input = cast_like(x.index_select(0, rows), queries);
      const auto key = keys(input).view({-1, 7, 2, 8}).transpose(1, 2);
      return at::scaled_dot_product_attention(
                 queries.expand({rows.numel(), 2, 6, 8}), key, key)
          .pow(2)
          .mean();
    });
  });
}

TEST(OperatorParity, EinsumOfTwoWeights) {
  expect_same_training_in_both_types([] {
    const auto a = random_parameter({4, 5, 6});
    const auto b = random_parameter({6, 5, 3});
    const auto x = torch::randn({kRows, 4});
    return model_of(
        unit_per_tensor({{"a", a}, {"b", b}}), [=](const Tensor& rows) {
          const auto input = cast_like(x.index_select(0, rows), a);
          return at::einsum("bi,ijk,kjl->bl", {input, a, b}).pow(2).mean();
        });
  });
}

TEST(OperatorParity, IndexAndScatter) {
  const auto make = [] {
    const auto w = random_parameter({20, 7});
    const auto v = random_parameter({3, 7});
    const auto index = torch::tensor({1, 3, 15});
    return model_of(unit_per_tensor({{"w", w}, {"v", v}}), [=](const Tensor&) {
      auto put = w.clone();
      put.index_put_({index}, v);
      const auto scattered =
          w.scatter(0, index.unsqueeze(1).expand({3, 7}), v * 2);
      return put.pow(2).mean() + w.index({index}).pow(3).mean() +
          scattered.pow(2).sum() + w.index_select(0, index).sum() +
          w.gather(0, index.view({1, 3})).pow(2).sum() +
          at::where(w > 0, w, v.mean()).pow(2).sum();
    });
  };
  expect_same_training_in_both_types(make, same_batch());
}

TEST(OperatorParity, MasksAndClamps) {
  const auto make = [] {
    const auto w = random_parameter({20, 7});
    const auto s = torch::tensor(0.3F).requires_grad_();
    const auto mask = torch::randn({20, 7}) > 0;
    return model_of(unit_per_tensor({{"w", w}, {"s", s}}), [=](const Tensor&) {
      const auto bound = s.item<double>();
      return w.masked_fill(mask, s.detach()).pow(2).sum() +
          at::where(mask, s, w).pow(2).sum() + w.masked_select(mask).sum() +
          w.clamp(-bound, bound).sum() + at::clamp(w, s, s + 1).sum();
    });
  };
  expect_same_training_in_both_types(make, same_batch());
}

TEST(OperatorParity, BiasInAnotherUnitThanItsWeight) {
  expect_same_training_in_both_types([] {
    const auto w = random_parameter({9, 9});
    const auto b = random_parameter({9});
    const auto conv_w = random_parameter({4, 1, 3});
    const auto conv_b = random_parameter({4});
    const auto batch_b = random_parameter({2, 1, 9});
    const auto batch_w = random_parameter({2, 9, 9});
    const auto x = torch::randn({kRows, 9});
    const auto sequences = torch::randn({kRows, 3, 9});
    return model_of(
        unit_per_tensor(
            {{"w", w},
             {"b", b},
             {"conv_w", conv_w},
             {"conv_b", conv_b},
             {"batch_b", batch_b},
             {"batch_w", batch_w}}),
        [=](const Tensor& rows) {
          const auto input = cast_like(x.index_select(0, rows), w);
          const auto sequence = cast_like(sequences.index_select(0, rows), w);
          const auto y = F::linear(input, w, b) + at::addmm(b, input, w) +
              at::layer_norm(input, {9}, b, b) +
              F::linear(sequence, w, b).sum(1);
          const auto convolved =
              at::conv1d(input.unsqueeze(1), conv_w, conv_b, 1, 1);
          const auto batched =
              at::baddbmm(batch_b, input.expand({2, -1, 9}), batch_w);
          return y.pow(2).mean() + convolved.pow(2).mean() +
              batched.pow(2).mean();
        });
  });
}

TEST(OperatorParity, WeightNormAndSpectralNorm) {
  expect_same_training_in_both_types([] {
    const auto v = random_parameter({11, 7});
    const auto g = random_parameter({11, 1});
    const auto w = random_parameter({7, 11});
    auto u = torch::randn({7});
    const auto x = torch::randn({kRows, 7});
    const auto options = F::NormalizeFuncOptions().dim(0);
    const auto iterate = [=](const Tensor& weight, const Tensor& left) {
      return F::normalize(weight.t().mv(left), options);
    };
    return model_of(
        unit_per_tensor({{"v", v}, {"g", g}, {"w", w}}),
        [=](const Tensor& rows) mutable {
          { // two iterations of the power method, in float32 always
            const torch::NoGradGuard no_grad;
            const auto whole = w.to(at::kFloat);
            for (int i = 0; i < 2; ++i) {
              u = F::normalize(whole.mv(iterate(whole, u)), options);
            }
          }
          const auto left = cast_like(u, w);
          const auto sigma = at::dot(left, w.mv(iterate(w, left)));
          const auto input = cast_like(x.index_select(0, rows), v);
          const auto normed = at::_weight_norm(v, g, 0);
          return F::linear(F::linear(input, normed), w / sigma).pow(2).mean();
        });
  });
}

TEST(OperatorParity, LinearAlgebra) {
  const auto make = [] {
    const auto w = (torch::eye(9) * 3 + torch::randn({9, 9}) * 0.3)
                       .detach()
                       .requires_grad_();
    const auto b = random_parameter({9, 8});
    return model_of(unit_per_tensor({{"w", w}, {"b", b}}), [=](const Tensor&) {
      const auto square = w.mm(w.t());
      return at::linalg_inv(w).pow(2).sum() +
          std::get<1>(at::linalg_slogdet(square)) +
          std::get<1>(at::linalg_svd(w)).sum() +
          at::linalg_matrix_exp(w * 0.1).sum() +
          at::linalg_cholesky(square).sum() +
          at::linalg_solve(w, b).pow(2).sum();
    });
  };
  expect_same_training(make, same_batch());
}

TEST(OperatorParity, DistancesAndSampling) {
  const auto make = [] {
    const auto a = random_parameter({17, 4});
    const auto b = random_parameter({18, 4});
    return model_of(unit_per_tensor({{"a", a}, {"b", b}}), [=](const Tensor&) {
      const auto image = a.slice(0, 0, 16).reshape({1, 1, 16, 4});
      const auto places = at::tanh(b.slice(0, 0, 16).reshape({1, 4, 8, 2}));
      return at::cdist(a, b).sum() + at::pdist(a).sum() +
          at::cosine_similarity(a.unsqueeze(1), b.unsqueeze(0), 2).sum() +
          at::kl_div(at::log_softmax(a, 1), at::softmax(b.slice(0, 0, 17), 1)) +
          at::logsumexp(at::cat({a, b}), at::IntArrayRef{0, 1}) +
          at::tensordot(a, b, {1}, {1}).sum() +
          at::outer(a.select(1, 0), b.select(1, 0)).sum() +
          at::grid_sampler(image, places, 0, 0, false).sum();
    });
  };
  expect_same_training(make, same_batch());
}

TEST(OperatorParity, WeightsAsSourcesOfOutVariantsAndUpdatesInPlace) {
  const auto make = [] {
    const auto a = random_parameter({17, 5});
    const auto b = random_parameter({17, 5});
    return model_of(unit_per_tensor({{"a", a}, {"b", b}}), [=](const Tensor&) {
      auto out = torch::empty({17, 5}, a.options());
      {
        const torch::NoGradGuard no_grad;
        at::mul_out(out, a, b);
        at::add_out(out, out, a);
      }
      auto y = torch::zeros({17, 5}, a.options());
      y.copy_(a);
      y.add_(b);
      y.addcmul_(a, b);
      y.lerp_(b, 0.3);
      y.narrow(0, 0, 2).copy_(b.narrow(0, 1, 2));
      return (y * out).pow(2).mean();
    });
  };
  expect_same_training_in_both_types(make, same_batch());
}

TEST(OperatorParity, ViewsOfWeights) {
  const auto make = [] {
    const auto a = random_parameter({18, 4});
    const auto b = random_parameter({18, 4});
    return model_of(unit_per_tensor({{"a", a}, {"b", b}}), [=](const Tensor&) {
      auto sum = a.as_strided({3, 2}, {2, 1}, 1).sum() +
          a.unfold(0, 2, 1).pow(2).sum() + at::diagonal(b).sum() +
          b.flip(0).mul(a).sum() +
          a.t().reshape({-1}).dot(b.permute({1, 0}).reshape({-1})) +
          a.repeat({2, 1}).sum() + a.expand({2, 18, 4}).sum() +
          (a.movedim(0, 1).contiguous() * b.t()).sum() +
          a.roll(3).mul(b).sum() + at::tril(b).sum();
      for (const auto& column : a.unbind(1)) {
        sum = sum + (column * b.select(1, 0)).sum();
      }
      for (const auto& rows : b.split(5)) {
        sum = sum + rows.pow(2).sum();
      }
      const auto bits = a.detach().view(at::kInt).select(0, 0).sum();
      return sum + bits.to(at::kFloat) * 1e-10; // not to be differentiated
    });
  };
  expect_same_training(make, same_batch());
}

TEST(OperatorParity, OperatorsThatReadEightUnits) {
  const auto make = [] {
    std::vector<Tensor> weights;
    NamedTensors named;
    for (int i = 0; i < 8; ++i) {
      weights.push_back(random_parameter({9, 9}, 0.3));
      named.emplace_back("weight" + std::to_string(i), weights.back());
    }
    return model_of(unit_per_tensor(named), [=](const Tensor&) {
      const auto row = weights[0].select(0, 0);
      const auto column = weights[1].select(0, 1);
      auto sum = at::stack(weights).pow(2).sum() +
          at::linalg_multi_dot(weights).sum() + at::block_diag(weights).sum() +
          at::cartesian_prod({row, column}).sum() +
          at::meshgrid({row, column}, "ij")[0].sum() +
          at::cat(weights, 1).tanh().sum();
      for (const auto& product : at::_foreach_mul(weights, weights)) {
        sum = sum + product.sum();
      }
      for (const auto& norm : at::_foreach_norm(weights, 2)) {
        sum = sum + norm;
      }
      return sum;
    });
  };
  expect_same_training(make, same_batch());
}

} // namespace
} // namespace operators
} // namespace fsdp::testing
