#pragma once

#include <fsdp/description.h>
#include <fsdp/export.h>
#include <fsdp/memory.h>
#include <fsdp/options.h>
#include <fsdp/tensors_of.h>
#include <fsdp/world.h>

#include <torch/nn/module.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::serialize {
class OutputArchive;
}
namespace torch::optim {
class Optimizer;
}

namespace fsdp {

namespace detail {
class Net;
} // namespace detail

/// While one is open, the parameters of its net have their whole shape, and
/// operators that read them find them whole, also through methods other than
/// forward and in code outside of the module. Regions nest. Opening and closing
/// are local; gathers happen when operators read weights.
class FSDP_API Region {
 public:
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) = delete;
  /// Closes. A failure is thrown by the next call on the net, since destructors
  /// must not throw. When an exception is on its way the region is abandoned:
  /// the other ranks learn of it and gradients of the region are dropped.
  ~Region();

  /// Closes, and throws what went wrong (here or on another rank).
  void close();

  /// Closes because of `error`, whose text the other ranks get.
  void abandon(const std::exception& error) noexcept;

 private:
  friend class ShardedModule;
  explicit Region(std::shared_ptr<detail::Net> net);
  std::shared_ptr<detail::Net> net_; // null: closed
  int exceptions_;                   // in flight when it was opened
};

/// While one lives, gradients are kept whole on their rank and not reduced. The
/// next backward pass without one reduces their sum. When a pass fails,
/// gradients that wait are dropped with it, on all ranks, and the next call
/// says so unless ShardedModule::drop_unreduced_gradients() was called first.
class FSDP_API NoSync {
 public:
  NoSync(NoSync&& other) noexcept;
  NoSync& operator=(NoSync&& other) = delete;
  ~NoSync();

 private:
  friend class ShardedModule;
  explicit NoSync(std::shared_ptr<detail::Net> net);
  std::shared_ptr<detail::Net> net_;
};

struct WholeParametersOptions {
  /// Keep changes: each rank takes its slice of what it finds when the scope
  /// closes. All ranks must make the same changes. Otherwise they are dropped.
  bool write_back = false;
};

/// While one lives, the parameters are ordinary whole tensors, in the dtype
/// that they were built with and in memory of their own: for export, for
/// editing, or to call the module itself. The net cannot be called meanwhile.
/// Collective: opening.
class FSDP_API WholeParameters {
 public:
  WholeParameters(WholeParameters&& other) noexcept;
  WholeParameters& operator=(WholeParameters&& other) = delete;
  /// Closes. A failure is thrown by the next call on the net.
  ~WholeParameters();

  /// Closes, and throws for a parameter that was given another size or dtype.
  void close();

 private:
  friend class ShardedModule;
  WholeParameters(
      std::shared_ptr<detail::Net> net,
      WholeParametersOptions options);
  std::shared_ptr<detail::Net> net_; // null: closed
  WholeParametersOptions options_;
};

/// A sharded model, without its type: what FullyShardedDataParallel<M> and
/// ShardedTensors have in common.
///
/// [Note: What parameters() shows] The tensors of the model keep their identity
/// for ever: `parameters()`, the module's own members and an optimizer's list
/// are the same TensorImpls. Outside of regions their contents are this rank's
/// shards (1-D, possibly of 0 elements) and their .grad, if there is one, has
/// the shard's size; so optimizers, clipping and moving averages work on
/// shards. Inside a region they have their whole shape. full_sizes() always
/// tells the whole shape.
class FSDP_API ShardedModule {
 public:
  ShardedModule(const ShardedModule&) = delete;
  ShardedModule& operator=(const ShardedModule&) = delete;
  ShardedModule(ShardedModule&&) noexcept;
  ShardedModule& operator=(ShardedModule&&) noexcept;
  virtual ~ShardedModule();

  /// All parameters in order of registration, each once, also ignored ones. A
  /// tied parameter has the name of its first place.
  std::vector<at::Tensor> parameters() const;
  std::vector<std::pair<std::string, at::Tensor>> named_parameters() const;

  /// The whole shape of a parameter, by its fully qualified name.
  std::vector<int64_t> full_sizes(const std::string& name) const;

  const World& world() const;

  /// Opens a region for code that uses parameters outside of a call of the net.
  [[nodiscard]] Region region();

  /// Gradients of backward passes that end while it lives are not reduced.
  [[nodiscard]] NoSync no_sync();

  /// Forgets gradients that wait for a reduction (see NoSync): for a step that
  /// is given up after some of its micro-batches. Local; .grad stays.
  void drop_unreduced_gradients();

  /// All parameters as whole tensors. Throws inside of a region. Collective.
  [[nodiscard]] WholeParameters whole_parameters(
      WholeParametersOptions options = {});

  /// Gathers all units and keeps them whole between regions, until reshard():
  /// for many forward passes between two optimizer steps. parameters() are
  /// shards outside of regions all the same. Collective.
  void unshard();
  void reshard();

  /// When operators first read a unit in a forward (backward) pass, the gathers
  /// of `ahead` start, in that order, as far as Options::slots allows; without
  /// such a rule that is the unit which followed in the last step. For units
  /// that are read in an order that changes. Names as in describe(). An empty
  /// list takes the rule back. All ranks set the same, between passes. Local.
  void set_forward_prefetch(
      const std::string& unit,
      const std::vector<std::string>& ahead);
  void set_backward_prefetch(
      const std::string& unit,
      const std::vector<std::string>& ahead);

  /// Scales all gradients such that their norm, over all parameters and ranks,
  /// is at most `max_norm`, and returns the norm before. Replicated and ignored
  /// parameters count once. The norm is accumulated in float32 or better;
  /// `norm_type` may be any positive number or infinity. Collective; the result
  /// has the same bits on all ranks.
  double clip_grad_norm_(
      double max_norm,
      double norm_type = 2.0,
      bool error_if_nonfinite = false);

  /// Clamps each element of the gradients to [-clip_value, clip_value]. Local.
  void clip_grad_value_(double clip_value);

  /// Replaces the gradients of ignored parameters by their mean over the ranks,
  /// whatever Options::gradient_divide_factor is. Collective.
  void average_ignored_gradients();

  /// The mean over the ranks of a number that each has, such as its loss, for a
  /// log. Summed in float64 in rank order: the same bits on all ranks, and NaN
  /// where any rank has NaN. A tensor must have one element. Collective.
  double mean_over_ranks(double value) const;
  double mean_over_ranks(const at::Tensor& value) const;

  /// Cuts the state that `optimizer` has of parameters of this net from before
  /// it was sharded, in whole shapes, to this rank's shards, so that training
  /// goes on as if unsharded. Step counts stay; state that is of shards already
  /// is left alone. For libtorch's Adam, AdamW, SGD, RMSprop and Adagrad and
  /// for this library's; LBFGS is refused. Throws, and changes nothing, for
  /// state that fits neither the parameter nor its shard. Local.
  void adopt(torch::optim::Optimizer& optimizer) const;

  /// Throws when parameters that every rank holds whole (kNoShard units and
  /// ignored ones) differ between ranks, and names the first. Collective.
  void check_replicas() const;

  MemoryReport memory() const;
  void reset_peak_memory();

  NetDescription describe() const;

  /// How many times a unit was gathered.
  int64_t gathers() const;

 protected:
  ShardedModule() = default;
  /// The tensors of one unit by name, or of all units by the unit's name.
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
  using NamedUnits = std::vector<std::pair<std::string, NamedTensors>>;

  void shard_module(
      const std::shared_ptr<torch::nn::Module>& module,
      World world,
      const Options& options);
  void shard_tensors(NamedUnits units, World world, const Options& options);
  /// Collective: makes all parameters whole for good and ends sharding.
  void unwrap_parameters();

  /// Runs `call` in a region; an exception abandons the region and is rethrown.
  /// What it returns by value is cast to MixedPrecision::output_dtype.
  template <class F>
  std::invoke_result_t<F> in_region(F&& call);

  const std::shared_ptr<detail::Net>& net() const;

 private:
  template <class F>
  void shard(
      F&& choose_units,
      torch::nn::Module* module,
      const World& world,
      const Options& options);

  at::Tensor output_of(const at::Tensor& tensor) const;

  std::shared_ptr<detail::Net> net_;
  std::optional<at::ScalarType> output_dtype_;
  std::vector<std::pair<std::string, at::Tensor>> parameters_;
  std::vector<std::pair<std::string, at::Tensor>> ignored_;
  std::vector<std::pair<std::string, at::Tensor>> ignored_aliases_;
};

/// torch::save(net, file) would write one rank's shards. Save the module that
/// unwrap() returns, or the tensors inside whole_parameters().
torch::serialize::OutputArchive& operator<<(
    torch::serialize::OutputArchive& archive,
    const ShardedModule& net) = delete;

template <class F>
std::invoke_result_t<F> ShardedModule::in_region(F&& call) {
  using Result = std::invoke_result_t<F>; // T, T& or T&&
  Region open = region();
  try {
    if constexpr (std::is_void_v<Result>) {
      std::forward<F>(call)();
      open.close();
    } else {
      Result result = std::forward<F>(call)();
      if constexpr (!std::is_reference_v<Result>) {
        const auto cast = [&](at::Tensor& tensor) {
          tensor = output_of(tensor);
        };
        if (output_dtype_.has_value()) {
          detail::tensors::visit_all(result, cast);
        }
      }
      open.close();
      return std::forward<Result>(result); // moves a T
    }
  } catch (const std::exception& error) {
    open.abandon(error);
    throw;
  }
}

} // namespace fsdp
