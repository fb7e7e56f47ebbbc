#pragma once

#include "runtime/flat_group.h"
#include "runtime/mesh.h"
#include "runtime/reducer.h"
#include "runtime/unit.h"
#include "schedule/schedule.h"

#include <fsdp/world.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace fsdp::detail {

/// What a unit consists of, before it is sharded.
struct UnitSpec {
  std::string name;
  Strategy strategy = Strategy::kFullShard;
  MixedPrecision mixed_precision;
  int64_t part_ranks = 0;            // see GroupSettings
  std::vector<Parameter> parameters; // `tensor` and `names` are set
};

struct NetSettings {
  double divide_factor = 1.0;
  int64_t slots = 2;
  int64_t shard_size = 0; // ranks per group of the hybrid strategies
};

enum class RegionKind : uint8_t { kForward, kBackward };

/// The sharded parameters of one model on one rank: which units are whole, and
/// when regions open and close.
///
/// [Note: Regions] Parameters are whole only inside a region. Forward regions
/// are opened by the program (net(...), net.call, net.region), backward regions
/// by the autograd engine (backward_engine.cpp) around the outermost pass that
/// involves this net. Regions nest; the outermost counts. Opening and closing
/// are local. The end of the outermost backward pass settles its gradients,
/// which is collective, also when a forward region is open around it. Closing
/// by an exception tells the other ranks and leaves everything as if the region
/// had not been opened: weights, and .grad.
class Net : public std::enable_shared_from_this<Net> {
 public:
  static std::shared_ptr<Net>
  make(World world, std::vector<UnitSpec> specs, NetSettings settings);
  ~Net();
  Net(const Net&) = delete;
  Net& operator=(const Net&) = delete;

  const World& world() const { return world_; }
  /// Grows with each net of this process: the nets of one rank have the same
  /// order on all ranks.
  uint64_t id() const { return id_; }
  std::vector<std::unique_ptr<Unit>>& units() { return units_; }
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  std::string rank_text() const;

  // Regions.
  void enter(RegionKind kind, bool accumulates);
  void leave(
      RegionKind kind); // when it throws, the region is closed all the same
  void fail(RegionKind kind, const std::string& reason) noexcept;
  bool in_region() const { return depth_ > 0; }
  /// For destructors, which must not throw: the next enter() throws `error`.
  void remember_error(std::exception_ptr error);

  /// Makes the units of `groups` whole and pins them; unpin() afterwards.
  void touch(std::span<FlatGroup* const> groups);
  void unpin(std::span<FlatGroup* const> groups);
  void mark_written(FlatGroup& group);
  /// The program writes to shards: copies that were kept whole are stale.
  void shard_written(FlatGroup& group);

  /// Keeps all units whole between regions, and lets them go again.
  void unshard();
  void reshard();

  /// All parameters as ordinary whole tensors, and back. Collective: opening.
  void open_whole();
  void close_whole(Writes writes);

  void
  gradient_arrived(FlatGroup& group, int64_t index, const at::Tensor& gradient);

  /// See ShardedModule::set_forward_prefetch.
  void set_prefetch(
      PassKind kind,
      const std::string& unit,
      const std::vector<std::string>& ahead);

  void drop_unreduced_gradients();
  void add_no_sync(int count) { no_sync_ += count; }

  /// Communicator for collectives outside of regions (clipping, scalars).
  Communicator& communicator() const { return *report_communicator_; }

  int64_t unreduced_bytes() const;
  int64_t gathered_bytes() const;
  int64_t peak_gathered_bytes() const { return peak_gathered_bytes_; }
  void reset_peak() { peak_gathered_bytes_ = gathered_bytes(); }
  int64_t gathers() const { return gathers_; }

 private:
  Net(World world, NetSettings settings);
  void build(std::vector<UnitSpec> specs);
  void make_meshes(const std::vector<UnitSpec>& specs);
  const Mesh& mesh_of(Strategy strategy) const;
  void add_unit(UnitSpec spec, bool any_cast);
  void share_weights();
  void reserve_memory();
  void check_not_aborted() const;
  void check_may_enter() const;
  void open(RegionKind kind);
  void close();
  void settle_pass();
  void note_epochs();
  void note_epochs_outside_of_regions();
  void go_on_after_failed_pass();
  void release_units();
  // [Note: Generations]
  void make_weights_writable(const char* what);
  void publish_weights();
  void retire_weights();
  void take_up_writes();   // of regions
  void take_up_replaced(); // parameters
  void fail_pass(const std::string& reason);
  void abandon(const std::string& reason);
  void tell_failure(const std::string& reason);
  void switch_back(Writes writes);
  void put_assigned_back();
  void set_gradients_aside();
  void put_gradients_back();
  bool keeps_whole(const Unit& unit) const;
  KeepPart keeps_part() const;
  void begin_pass(PassKind kind);
  void carry_out(const Decision& decision);
  void note_units(std::span<FlatGroup* const> groups); // in touched_
  const Unit& unit_named(const std::string& name) const;
  void note_peak();
  template <class F>
  void each_group(F&& visit) const;
  template <class F>
  void each_shared(F&& visit) const; // SharedWeights
  template <class F>
  void each_communicator(F&& visit) const;

  World world_;
  NetSettings settings_;
  std::vector<std::unique_ptr<Mesh>> meshes_; // of the world; of hybrid units
  std::shared_ptr<Communicator> report_communicator_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::unique_ptr<Schedule> schedule_;
  std::unique_ptr<Reducer> reducer_;

  mutable std::mutex mutex_; // touches may come from several threads
  int depth_ = 0;            // of regions
  int backward_depth_ = 0;   // of backward regions among them
  bool accumulated_ = false; // gradients may have arrived in this pass
  bool settled_ = false;     // a pass of this region was settled
  bool stale_ = false; // weights may change: a pass was settled, and none has
                       // gathered them to train with (kShardOptimizer)
  bool pass_failed_ = false;  // a backward pass inside this region; it was told
  bool ran_backward_ = false; // in this region, with gradients
  bool records_graph_ = false; // grad mode, when this region opened
  std::thread::id owner_;
  std::vector<uint64_t> epochs_;      // of the communicators, when it opened
  bool whole_open_ = false;           // open_whole()
  std::optional<std::string> broken_; // a collective failed in this region
  std::exception_ptr remembered_error_;
  std::vector<at::Tensor> gradients_aside_;
  /// .grad before a pass that was settled inside of a region, with parameters.
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_before_;
  std::vector<at::Tensor> hooks_due_; // parameters that have got a gradient
  uint64_t region_thread_ = 0;
  const uint64_t id_;
  std::vector<uint32_t> touched_; // of one touch, or of one unpin
  int no_sync_ = 0;
  int64_t peak_gathered_bytes_ = 0;
  int64_t gathers_ = 0;
};

template <class F>
void Net::each_group(F&& visit) const {
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups) {
      visit(*group);
    }
  }
}

template <class F>
void Net::each_shared(F&& visit) const {
  for (const auto& mesh : meshes_) {
    if (mesh->shared != nullptr) {
      visit(*mesh->shared);
    }
  }
}

template <class F>
void Net::each_communicator(F&& visit) const {
  for (const auto& mesh : meshes_) {
    mesh->each_communicator(visit);
  }
  visit(*report_communicator_);
}

} // namespace fsdp::detail
