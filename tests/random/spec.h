#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::random_models {

/// What a layer does; `in` and `out` are columns. Simple ones first: shrinking
/// goes towards the front.
enum class Kind : uint8_t {
  kScale,  // x * s (+ b), s and b vectors
  kScalar, // x * s, s of 0 dimensions
  kLinear,
  kEmpty,     // cat of x and a parameter of zero rows
  kIndex,     // columns chosen by an integer parameter
  kNorm,      // LayerNorm
  kEmbedding, // x + table[ids], `out` rows
  kBatchNorm,
  kConv,       // over the rows
  kMlp,        // residual; `out` is the hidden width
  kWeightNorm, // linear with g * w / |w|
  kCat,        // linear with the cat of two weights
  kBorrow,     // scales by the first weight of layer `from`
  kTied,       // linear with the weight of layer `from`, registered here too
  kCustom,     // a custom autograd function
  kAttention,  // residual; slices of one qkv weight
  kGru,
  kLstm,
};

struct LayerSpec {
  Kind kind = Kind::kScale;
  int in = 1;
  int out = 1;
  int from = 0;            // an earlier layer, for kBorrow and kTied
  bool transposed = false; // kTied: uses the transpose
  bool bias = false;
  bool frozen = false;
  bool twice = false;      // applied twice
  bool checkpoint = false; // recomputed in backward
  bool wide = false;       // float64 parameters in a float32 model
  bool penalty = false;    // its first weight is also used in the loss
  bool written = false;    // each forward changes its weight in place
  int skip = 0;            // bit s: not used in step s
  int absent = 0;          // bit r: rank r leaves the bias out
  int detached = 0;        // bit r: on rank r its weights get no gradients
  int flip = 0;            // before this step it is frozen, or thawed; 0: never

  bool operator==(const LayerSpec&) const = default;
};

enum class Numbers : uint8_t {
  kDouble,
  kFloat,
  kBFloat16, // compute only; parameters at rest are float32
};

/// How parameters are put into units.
enum class Units : uint8_t {
  kOne,
  kLayer,
  kParameter,
  kMixed,  // at random, into unit_count units in a random order
  kModule, // a torch::nn::Module whose layers are chosen by a policy
};

enum class OptimizerKind : uint8_t {
  kSgd,
  kMomentum,
  kAdamW,
  kAdagrad,
  kRmsprop
};

enum class Evaluation : uint8_t {
  kNone,
  kForward,
  kUnsharded, // between unshard(), before the optimizer steps, and reshard()
  kHeld,      // unshard() before the training, no reshard()
};

/// A model and how it is trained, in one printable line.
struct Spec {
  int seed = 0; // of values and of the mixture of units
  int world = 1;
  int rows = 1;        // per rank
  bool uneven = false; // rank r has r rows more
  bool same = false;   // all ranks take the same rows
  Numbers numbers = Numbers::kDouble;
  bool reduce_float = false; // kBFloat16: gradients are reduced in float32
  Units units = Units::kOne;
  int unit_count = 1;
  int slots = 2;
  OptimizerKind optimizer = OptimizerKind::kSgd;
  bool early = false; // the optimizer is made before sharding
  int steps = 1;
  /// Micro-batches of step i: one letter each of micro[i % size], `s` reduces
  /// gradients and `n` does not.
  std::vector<std::string> micro = {"s"};
  bool sum = false;  // of gradients over ranks, instead of the mean
  double clip = 0.0; // 0: off
  Evaluation evaluation = Evaluation::kNone; // after each step
  bool keep_zeros = false;                   // zero_grad(false)
  bool inside = false;                       // backward inside of the region
  bool again = false; // two backward passes over each graph
  bool joint = false; // one backward pass for all micro-batches of a step
  bool slope = false; // the loss has second derivatives
  int fail_step = -1; // this step fails on rank fail_rank
  int fail_micro = 0;
  int fail_rank = 0;
  int fail_layer = 0; // before this layer
  bool fail_backward = false;
  std::vector<LayerSpec> layers;

  bool operator==(const Spec&) const = default;

  /// Micro-batches of a step.
  const std::string& micro_of(int step) const {
    return micro[static_cast<size_t>(step) % micro.size()];
  }
};

/// One line, without what has its default value; parse() reads it back, and
/// throws std::invalid_argument for a text that is none.
std::string to_text(const Spec& spec);
Spec parse(const std::string& text);

/// The model of a seed.
Spec draw(uint64_t seed);

/// Changes what does not fit together (such as a batch norm over one row), as
/// little as possible.
void normalize(Spec& spec);

/// How complicated a spec is, for shrinking.
int64_t cost(const Spec& spec);

} // namespace fsdp::random_models
