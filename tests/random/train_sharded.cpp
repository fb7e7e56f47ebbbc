// One training by the ranks of a world, put together from what the ranks hold.

#include "harness/ranks.h"
#include "random/rank_result_bytes.h"
#include "random/rank_training.h"
#include "random/run.h"

#include <ATen/ATen.h>

#include <stdexcept>

namespace fsdp::random_models {
namespace {

[[noreturn]] void fail(const std::string& text) {
  throw std::runtime_error(text);
}

double mean(const std::vector<RankResult>& ranks, auto&& value_of) {
  double sum = 0.0;
  for (const auto& rank : ranks) {
    sum += value_of(rank);
  }
  return sum / static_cast<double>(ranks.size());
}

/// The whole of a parameter or gradient; undefined when no rank has any of it.
at::Tensor join(
    const std::string& name,
    const std::vector<at::Tensor>& parts,
    bool replicated,
    at::IntArrayRef sizes) {
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank].defined() != parts[0].defined()) {
      fail(name + " is defined on some ranks only");
    }
    if (replicated && parts[0].defined() && !at::equal(parts[rank], parts[0])) {
      fail(name + " differs between ranks 0 and " + std::to_string(rank));
    }
  }
  if (!parts[0].defined()) {
    return {};
  }
  if (replicated) {
    return parts[0];
  }
  std::vector<at::Tensor> flat;
  for (const auto& part : parts) {
    flat.push_back(part.reshape({-1}));
  }
  const auto all = at::cat(flat);
  const auto numel = c10::multiply_integers(sizes);
  if (numel == 0 ? all.numel() > 0
                 : all.numel() % numel != 0 || all.numel() == 0) {
    fail(name + " has " + std::to_string(all.numel()) + " elements in all");
  }
  const auto whole = all.narrow(0, 0, numel);
  for (int64_t begin = numel; begin < all.numel(); begin += numel) {
    if (!at::equal(all.narrow(0, begin, numel), whole)) {
      fail(name + " differs between groups of ranks");
    }
  }
  return whole.reshape(sizes);
}

/// `values_of(rank result)` of all ranks, joined by name.
Values join_all(
    const std::vector<RankResult>& ranks,
    const std::string& what,
    auto&& values_of) {
  Values joined;
  for (const auto& [name, whole] : ranks[0].whole) {
    std::vector<at::Tensor> parts;
    for (const auto& rank : ranks) {
      parts.push_back(values_of(rank).at(name));
    }
    joined[name] =
        join(what + name, parts, ranks[0].replicated.at(name), whole.sizes());
  }
  return joined;
}

/// whole_parameters() must show, on all ranks, what the ranks hold.
std::string check_whole(
    const std::vector<RankResult>& ranks,
    const Values& joined) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& [name, value] : ranks[rank].whole) {
      if (!at::equal(value, joined.at(name).to(value.scalar_type()))) {
        return "whole_parameters() of rank " + std::to_string(rank) +
            " does not show the shards of " + name;
      }
    }
  }
  return "";
}

Training put_together(const std::vector<RankResult>& ranks) {
  Training training;
  for (size_t i = 0; i < ranks[0].losses.size(); ++i) {
    training.losses.push_back(
        mean(ranks, [i](const RankResult& rank) { return rank.losses.at(i); }));
  }
  for (size_t i = 0; i < ranks[0].evaluations.size(); ++i) {
    training.evaluations.push_back(mean(
        ranks, [i](const RankResult& rank) { return rank.evaluations.at(i); }));
  }
  training.norms = ranks[0].norms;
  for (const auto& rank : ranks) {
    if (rank.norms != training.norms) {
      fail("clip_grad_norm_ returned different norms on two ranks");
    }
  }
  for (size_t i = 0; i < ranks[0].gradients.size(); ++i) {
    training.gradients.push_back(join_all(
        ranks,
        "the gradient in update " + std::to_string(i) + " of ",
        [i](const RankResult& rank) { return rank.gradients.at(i); }));
  }
  training.parameters =
      join_all(ranks, "parameter ", [](const RankResult& rank) {
        return rank.parameters;
      });
  training.complaint = check_whole(ranks, training.parameters);
  return training;
}

} // namespace

Training train_sharded(const Spec& spec, Cut cut, const RunSettings& settings) {
  std::vector<std::string> results(static_cast<size_t>(spec.world));
  testing::run_ranks(
      spec.world,
      [&](const World& world) {
        results[static_cast<size_t>(world.rank())] = to_bytes(train_rank(
            settings.wrap ? settings.wrap(world) : world, spec, cut));
      },
      settings.timeout);
  testing::share_results(results);
  std::vector<RankResult> ranks;
  for (const auto& bytes : results) {
    ranks.push_back(from_bytes(bytes));
  }
  return put_together(ranks);
}

} // namespace fsdp::random_models
