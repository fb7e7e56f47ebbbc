#include "random/spec.h"

#include "random/fields.h"

#include <algorithm>
#include <random>

namespace fsdp::random_models {
namespace {

class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}

  int below(int n) {
    return static_cast<int>(engine_() % static_cast<uint64_t>(n));
  }
  int between(int low, int high) { return low + below(high - low + 1); }
  bool percent(int chance) { return below(100) < chance; }
  template <class E>
  E any_of() {
    return static_cast<E>(below(static_cast<int>(Names<E>::kAll.size())));
  }

 private:
  std::mt19937_64 engine_;
};

/// Columns: powers of two and what lies beside them, mostly small.
int draw_width(Dice& dice) {
  return dice.percent(70) ? dice.between(1, 9) : dice.between(8, 17);
}

LayerSpec draw_layer(Dice& dice, int index, const Spec& spec) {
  LayerSpec layer;
  layer.kind = dice.any_of<Kind>();
  layer.in = draw_width(dice);
  layer.out = draw_width(dice);
  layer.from = index == 0 ? 0 : dice.below(index);
  layer.transposed = dice.percent(50);
  layer.bias = dice.percent(70);
  layer.frozen = dice.percent(12);
  layer.twice = dice.percent(15);
  layer.checkpoint = dice.percent(15);
  layer.wide = dice.percent(20);
  layer.penalty = dice.percent(15);
  layer.written = dice.percent(12);
  layer.skip = dice.percent(20) ? dice.below(1 << spec.steps) : 0;
  layer.absent = dice.percent(25) ? dice.below(1 << spec.world) : 0;
  layer.detached = dice.percent(20) ? dice.below(1 << spec.world) : 0;
  layer.flip = dice.percent(12) ? dice.between(1, spec.steps - 1) : 0;
  return layer;
}

void draw_failure(Dice& dice, Spec& spec) {
  spec.fail_step = dice.below(spec.steps);
  spec.fail_micro = dice.below(3);
  spec.fail_rank = dice.below(spec.world);
  spec.fail_layer = dice.below(6);
  spec.fail_backward = dice.percent(50);
}

void draw_micro_batches(Dice& dice, Spec& spec) {
  if (dice.percent(50)) {
    return;
  }
  spec.micro.assign(static_cast<size_t>(dice.between(1, 2)), "");
  for (auto& micro : spec.micro) {
    const int count = dice.between(1, 3);
    for (int i = 0; i < count; ++i) {
      micro += dice.percent(i + 1 == count ? 85 : 35) ? 's' : 'n';
    }
  }
}

bool has_weight(const LayerSpec& layer) {
  return layer.kind != Kind::kIndex && layer.kind != Kind::kEmpty &&
      layer.kind != Kind::kBorrow && layer.kind != Kind::kTied;
}

/// Whether its first weight is a matrix that a linear layer can use.
bool has_matrix(const LayerSpec& layer) {
  return has_weight(layer) && layer.kind != Kind::kScale &&
      layer.kind != Kind::kScalar && layer.kind != Kind::kNorm &&
      layer.kind != Kind::kBatchNorm && layer.kind != Kind::kConv;
}

/// Whether backward reads the same weights in the same order when it needs the
/// gradient of the input only.
bool may_be_detached(Kind kind) {
  return kind != Kind::kIndex && kind != Kind::kWeightNorm &&
      kind != Kind::kCat && kind != Kind::kBorrow && kind != Kind::kTied;
}

void normalize_layer(Spec& spec, size_t index) {
  auto& layer = spec.layers[index];
  layer.in = std::clamp(layer.in, 1, 64);
  layer.out = std::clamp(layer.out, 1, 64);
  const bool refers = layer.kind == Kind::kBorrow || layer.kind == Kind::kTied;
  if (refers) {
    const auto fits = [&](size_t i) {
      return layer.kind == Kind::kTied ? has_matrix(spec.layers[i])
                                       : has_weight(spec.layers[i]);
    };
    size_t from = std::min(static_cast<size_t>(std::max(layer.from, 0)), index);
    while (from < index && !fits(from)) {
      ++from;
    }
    layer.from = static_cast<int>(from);
    layer.kind = from < index ? layer.kind : Kind::kLinear;
  }
  if (layer.kind != Kind::kBorrow && layer.kind != Kind::kTied) {
    layer.from = 0;
  }
  layer.transposed = layer.transposed && layer.kind == Kind::kTied;
  if (spec.numbers == Numbers::kBFloat16 && layer.kind == Kind::kBatchNorm) {
    layer.kind = Kind::kNorm; // statistics are not kept in 16 bits
  }
  layer.wide = layer.wide && spec.numbers == Numbers::kFloat &&
      layer.kind != Kind::kTied && layer.kind != Kind::kBorrow;
  layer.penalty = layer.penalty && has_weight(layer);
  // Not where a graph of before would still be used, nor where it would have to
  // be undone; and 16-bit copies round.
  layer.written = layer.written && has_weight(layer) && !spec.joint &&
      spec.fail_step < 0 && spec.numbers != Numbers::kBFloat16;
  layer.skip &= (1 << spec.steps) - 1;
  // Ranks must use units in the same order, so that a rank may leave out only
  // what lies in a unit that the layer reads anyway.
  const bool bias_beside_weight = layer.kind == Kind::kLinear && layer.bias &&
      (spec.units == Units::kOne || spec.units == Units::kLayer ||
       spec.units == Units::kModule);
  const int ranks = (1 << spec.world) - 1;
  layer.absent = bias_beside_weight ? layer.absent & ranks : 0;
  layer.detached = may_be_detached(layer.kind) ? layer.detached & ranks : 0;
  if (layer.flip < 0 || layer.flip >= spec.steps) {
    layer.flip = 0;
  }
}

void reduce_in_every_step(Spec& spec) {
  for (auto& micro : spec.micro) {
    micro.back() = 's';
  }
}

bool any_layer(const Spec& spec, auto&& predicate) {
  return std::any_of(spec.layers.begin(), spec.layers.end(), predicate);
}

void normalize_slope(Spec& spec) {
  spec.slope = spec.slope && spec.numbers == Numbers::kDouble &&
      !any_layer(spec, [](const LayerSpec& layer) {
                 return layer.kind == Kind::kAttention;
               });
  if (spec.slope) {
    for (auto& layer : spec.layers) {
      layer.checkpoint = false; // is not differentiable twice
      layer.absent = 0;
      layer.detached = 0;
    }
  }
}

void normalize_failure(Spec& spec) {
  if (spec.fail_step >= spec.steps) {
    spec.fail_step = -1;
  }
  if (spec.fail_step < 0) {
    spec.fail_step = -1;
    spec.fail_micro = spec.fail_rank = spec.fail_layer = 0;
    spec.fail_backward = false;
    return;
  }
  // What earlier passes left to be reduced would be dropped with the step, and
  // a step without a reduction would not tell the other ranks.
  reduce_in_every_step(spec);
  const auto count = static_cast<int>(spec.micro_of(spec.fail_step).size());
  const auto layers = static_cast<int>(spec.layers.size());
  spec.fail_micro = std::clamp(spec.fail_micro, 0, count - 1);
  spec.fail_rank = std::clamp(spec.fail_rank, 0, spec.world - 1);
  spec.fail_layer = std::clamp(spec.fail_layer, 0, layers);
}

} // namespace

void normalize(Spec& spec) {
  spec.world = std::clamp(spec.world, 1, 8);
  spec.steps = std::clamp(spec.steps, 1, 16);
  spec.rows = std::clamp(spec.rows, 1, 64);
  spec.slots = std::max(spec.slots, 1);
  spec.unit_count =
      spec.units == Units::kMixed ? std::max(spec.unit_count, 1) : 1;
  if (spec.numbers != Numbers::kBFloat16) {
    spec.reduce_float = false;
  }
  if (spec.numbers != Numbers::kDouble &&
      spec.optimizer != OptimizerKind::kMomentum) {
    // Adaptive ones make rounding noise as large as the learning rate where a
    // gradient is zero by symmetry, such as a bias before a normalisation.
    spec.optimizer = OptimizerKind::kSgd;
  }
  if (spec.optimizer == OptimizerKind::kAdagrad) {
    spec.early = false; // its state is made with it, in whole shapes
  }
  if (spec.layers.empty() && spec.units == Units::kModule) {
    spec.units = Units::kOne;
  }
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    normalize_layer(spec, i);
  }
  const bool batch_norm = any_layer(spec, [](const LayerSpec& layer) {
    return layer.kind == Kind::kBatchNorm;
  });
  if (batch_norm) { // the same statistics on all ranks
    spec.same = true;
    spec.rows = std::max(spec.rows, 2);
    for (auto& layer : spec.layers) {
      layer.absent = 0;
      layer.detached = 0;
    }
  }
  spec.uneven = spec.uneven && !spec.same;
  const bool recurrent = any_layer(spec, [](const LayerSpec& layer) {
    return layer.kind == Kind::kGru || layer.kind == Kind::kLstm;
  });
  if (spec.uneven && recurrent) {
    // Backward over one row does not read the recurrent weight, over two it
    // does; ranks must read the same units.
    spec.rows = std::max(spec.rows, 2);
  }
  spec.inside = spec.inside && !spec.joint;
  if (any_layer(spec, [](const LayerSpec& layer) { return layer.flip > 0; })) {
    reduce_in_every_step(spec); // the flag must not change in between
  }
  normalize_slope(spec);
  normalize_failure(spec);
}

Spec draw(uint64_t seed) {
  Dice dice(seed);
  Spec spec;
  spec.seed = static_cast<int>(seed % 1'000'000);
  spec.world = dice.percent(15) ? 1 : dice.between(2, 4);
  spec.rows = dice.between(1, 4);
  spec.uneven = dice.percent(25);
  spec.same = dice.percent(20);
  const int numbers = dice.below(100);
  spec.numbers = numbers < 70 ? Numbers::kDouble
      : numbers < 85          ? Numbers::kFloat
                              : Numbers::kBFloat16;
  spec.reduce_float = dice.percent(50);
  spec.units = dice.any_of<Units>();
  spec.unit_count = dice.between(1, 5);
  spec.slots = dice.between(1, 3);
  spec.optimizer = dice.any_of<OptimizerKind>();
  spec.early = dice.percent(30);
  spec.steps = dice.between(2, 4);
  draw_micro_batches(dice, spec);
  spec.sum = dice.percent(10);
  spec.clip = dice.percent(25) ? dice.between(1, 20) / 10.0 : 0.0;
  spec.evaluation =
      dice.percent(40) ? dice.any_of<Evaluation>() : Evaluation::kNone;
  spec.keep_zeros = dice.percent(30);
  spec.inside = dice.percent(15);
  spec.again = dice.percent(10);
  spec.joint = dice.percent(15);
  spec.slope = dice.percent(12);
  if (dice.percent(20)) {
    draw_failure(dice, spec);
  }
  const int count = dice.between(1, 6);
  for (int i = 0; i < count; ++i) {
    spec.layers.push_back(draw_layer(dice, i, spec));
  }
  normalize(spec);
  return spec;
}

int64_t cost(const Spec& spec) {
  int64_t sum = 0;
  const auto add = [&sum](const std::string& name, const auto& value) {
    using T = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<T, std::vector<std::string>>) {
      for (const auto& micro : value) {
        sum += 10 * std::ssize(micro) +
            std::count(micro.begin(), micro.end(), 'n');
      }
    } else if (name == "slots") {
      sum += std::abs(static_cast<int>(value) - Spec().slots);
    } else if (name == "clip") {
      sum += value != T{} ? 1 : 0;
    } else if (name == "world" || name == "steps") {
      sum += 10 * static_cast<int64_t>(value);
    } else if (name == "fail_step") {
      sum += static_cast<int64_t>(value) >= 0 ? 10 + static_cast<int64_t>(value)
                                              : 0;
    } else if (name != "seed") {
      sum += static_cast<int64_t>(value);
    }
  };
  visit_fields(spec, add);
  for (const auto& layer : spec.layers) {
    sum += 50 + static_cast<int64_t>(layer.kind);
    visit_fields_of_layer(layer, add);
  }
  return sum;
}

} // namespace fsdp::random_models
