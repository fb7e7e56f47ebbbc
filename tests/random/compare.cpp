#include "random/run.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>

namespace fsdp::random_models {
namespace {

/// |actual - expected| <= relative * (largest of the tensor) + absolute.
struct Tolerance {
  double relative;
  double absolute;
  double of_largest_gradient; // gradients only: of all in that update
};

Tolerance tolerance_of(const Spec& spec) {
  switch (spec.numbers) {
    case Numbers::kDouble:
      return {1e-10, 1e-12, 1e-10};
    case Numbers::kFloat:
      return {1e-6, 1e-8, 1e-5};
    case Numbers::kBFloat16:
      return {5e-2, 5e-3, 5e-2};
  }
  return {0.0, 0.0, 0.0};
}

std::string differ(
    const std::string& what,
    const at::Tensor& actual,
    const at::Tensor& expected,
    Tolerance tolerance) {
  if (actual.defined() != expected.defined()) {
    return what + (actual.defined() ? " is defined" : " is undefined") +
        ", but the unsharded one is not";
  }
  if (!expected.defined()) {
    return "";
  }
  std::ostringstream text;
  if (actual.sizes() != expected.sizes() ||
      actual.scalar_type() != expected.scalar_type()) {
    text << what << " is " << actual.scalar_type() << actual.sizes()
         << ", but should be " << expected.scalar_type() << expected.sizes();
    return text.str();
  }
  if (expected.numel() == 0) {
    return "";
  }
  const auto wide = expected.to(at::kDouble);
  const auto largest = wide.abs().max().item<double>();
  const auto error = (actual.to(at::kDouble) - wide).abs().max().item<double>();
  if (error <= tolerance.relative * largest + tolerance.absolute) {
    return ""; // not for NaN
  }
  text << what << " is off by " << error << " where values are up to "
       << largest;
  return text.str();
}

std::string differ(
    const std::string& what,
    const std::vector<double>& actual,
    const std::vector<double>& expected,
    double relative) {
  if (actual.size() != expected.size()) {
    return what + ": " + std::to_string(actual.size()) + " values, but " +
        std::to_string(expected.size()) + " unsharded";
  }
  for (size_t i = 0; i < actual.size(); ++i) {
    const double error = std::abs(actual[i] - expected[i]);
    if (!(error <= relative * std::abs(expected[i]) + 1e-12)) {
      std::ostringstream text;
      text << what << " " << i << " is " << actual[i] << ", but should be "
           << expected[i] << " (off by " << error << ")";
      return text.str();
    }
  }
  return "";
}

std::string differ(
    const std::string& what,
    const Values& actual,
    const Values& expected,
    Tolerance tolerance) {
  if (actual.size() != expected.size()) {
    return what + "other parameters";
  }
  for (const auto& [name, value] : expected) {
    const auto found = actual.find(name);
    if (found == actual.end()) {
      return what + name + " is missing";
    }
    auto text = differ(what + name, found->second, value, tolerance);
    if (!text.empty()) {
      return text;
    }
  }
  return "";
}

/// A gradient may be what is left of a difference of larger ones, at weights
/// that are off by rounding already.
Tolerance for_gradients(Tolerance tolerance, const Values& gradients) {
  double largest = 0.0;
  for (const auto& [name, gradient] : gradients) {
    if (gradient.defined() && gradient.numel() > 0) {
      largest = std::max(largest, gradient.abs().max().item<double>());
    }
  }
  tolerance.absolute += tolerance.of_largest_gradient * largest;
  return tolerance;
}

/// Where `actual` departs from `expected`, gradients first.
std::string
differ(const Training& actual, const Training& expected, Tolerance tolerance) {
  std::string text;
  for (size_t i = 0; i < expected.gradients.size() && text.empty(); ++i) {
    text = differ(
        "the gradient in update " + std::to_string(i) + " of ",
        actual.gradients.at(i),
        expected.gradients[i],
        for_gradients(tolerance, expected.gradients[i]));
  }
  if (text.empty()) {
    text = differ("loss", actual.losses, expected.losses, tolerance.relative);
  }
  if (text.empty()) {
    text = differ("norm", actual.norms, expected.norms, tolerance.relative);
  }
  if (text.empty()) {
    text = differ(
        "evaluation",
        actual.evaluations,
        expected.evaluations,
        tolerance.relative);
  }
  if (text.empty()) {
    text =
        differ("parameter ", actual.parameters, expected.parameters, tolerance);
  }
  return text.empty() ? actual.complaint : text;
}

const char* name_of(Cut cut) {
  switch (cut) {
    case Cut::kFullShard:
      return "full shard";
    case Cut::kShardGradOp:
      return "shard grad op";
    case Cut::kShardOptimizer:
      return "shard optimizer";
    case Cut::kNoShard:
      return "no shard";
    case Cut::kPerLayer:
      return "layers cut differently";
    case Cut::kHybrid:
      return "hybrid";
  }
  return "";
}

std::string text_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  return ours != nullptr ? ours->what_without_backtrace() : error.what();
}

/// A norm over shards sums in another order than a norm over all, and groups of
/// ranks sum gradients in another order than all ranks together.
bool must_agree_in_bits(const Spec& spec, Cut cut) {
  return cut != Cut::kHybrid &&
      (spec.clip == 0.0 || cut == Cut::kShardGradOp ||
       cut == Cut::kShardOptimizer);
}

} // namespace

std::string failure_of(const Spec& spec, const RunSettings& settings) {
  Training expected;
  try {
    expected = train_unsharded(spec);
  } catch (const std::exception& error) {
    return kUnsharded + text_of(error);
  }
  std::vector<Cut> cuts = {
      Cut::kFullShard,
      Cut::kShardGradOp,
      Cut::kShardOptimizer,
      Cut::kNoShard,
      Cut::kHybrid};
  if (spec.units == Units::kModule) {
    cuts.push_back(Cut::kPerLayer);
  }
  std::optional<Training> first;
  for (const auto cut : cuts) {
    const auto prefix = std::string(name_of(cut)) + ": ";
    Training actual;
    try {
      actual = train_sharded(spec, cut, settings);
    } catch (const std::exception& error) {
      return prefix + text_of(error);
    }
    auto text = differ(actual, expected, tolerance_of(spec));
    if (!text.empty()) {
      return prefix + text;
    }
    if (!first) {
      first = std::move(actual);
    } else if (must_agree_in_bits(spec, cut)) {
      text = differ(actual, *first, {0.0, 0.0, 0.0});
      if (!text.empty()) {
        return prefix + "unlike full shard in bits: " + text;
      }
    }
  }
  return "";
}

} // namespace fsdp::random_models
