#pragma once

#include "layout/flat_layout.h"
#include "runtime/mesh.h"
#include "runtime/unit_storage.h"

#include <fsdp/communicator.h>
#include <fsdp/unit_options.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch::autograd {
struct PostAccumulateGradHook;
}

namespace fsdp::detail {

class Net;
struct Unit;

/// One parameter. `tensor` is the module's own: in all three states it is the
/// same TensorImpl, whose contents are exchanged. See [Note: Three states].
struct Parameter {
  at::Tensor tensor;
  std::vector<std::string> names; // fully qualified; several when it is tied
  std::vector<int64_t> sizes;     // whole
  bool full_precision = false;    // computes in the type that it has at rest
  at::Tensor sharded;             // contents while SHARDED
  at::Tensor whole;               // contents while RELEASED or UNSHARDED

  const std::string& name() const { return names.front(); }
};

enum class Writes : uint8_t { kKeep, kDrop };

/// Of whole weights that go: keep a part, so that the next gather stays inside
/// of a smaller group of ranks (reshard_after_forward_to). kOld: one that is
/// there, but do not make one.
enum class KeepPart : uint8_t { kNo, kOld, kYes };

/// What decides how the parameters of a unit are stored and used.
struct GroupSettings {
  std::string unit_name;
  int rank = 0;
  int world_size = 1;
  Strategy strategy = Strategy::kFullShard;
  MixedPrecision mixed_precision;
  /// Whole weights are sharded over groups of that many ranks between forward
  /// and backward; 0: over all.
  int64_t part_ranks = 0;
  /// Cast other inputs to this unit's compute type, even when the unit itself
  /// has no param_dtype (a unit left in float32 inside a bfloat16 net).
  bool cast_inputs = false;
};

/// The parameters of a unit that have one dtype and one requires_grad flag: one
/// flat index space, of which this rank owns one slice.
///
/// [Note: Three states] Outside of regions a parameter is SHARDED: 1-D, the
/// local elements, on the storage of the rank's slice. Inside a region it has
/// its whole shape on the storage of the whole group, which is either without
/// memory (RELEASED) or filled (UNSHARDED). Views that autograd saved share
/// that storage, so they see the weights again when it is filled again. With
/// kNoShard a parameter has its whole shape outside regions too, and stays an
/// ordinary tensor unless its unit computes in another type.
///
/// [Note: Shared slices] Where ranks have memory in common, the slices of all
/// lie there side by side in the type to compute with, so that a gather copies
/// nothing: UNSHARDED storages point to that memory, which others read too. A
/// region that writes to whole weights does so on a copy of its own, which
/// this rank then uses instead; the shard points to its slice of the copy. When
/// weights become writable again (see [Note: Generations]) that slice goes to
/// the shared memory.
class FlatGroup {
 public:
  FlatGroup(
      Net& net,
      GroupSettings settings,
      std::vector<Parameter> parameters,
      const Mesh& mesh);
  ~FlatGroup();
  FlatGroup(const FlatGroup&) = delete;
  FlatGroup& operator=(const FlatGroup&) = delete;

  /// Bytes of this rank's slice for computing; 0 where sharing has no use.
  int64_t shareable_bytes() const;

  /// Takes over the parameters; `buffer` is its place among the slices that the
  /// mesh shares. Once.
  void take_parameters(size_t buffer);

  Net& net() const { return net_; }
  /// The unit that it belongs to, and its place among all groups of the net.
  void attach(Unit& unit, size_t index) {
    unit_ = &unit;
    index_ = index;
  }
  Unit& unit() const { return *unit_; }
  size_t index() const { return index_; }
  const GroupSettings& settings() const { return settings_; }
  const Mesh& mesh() const { return mesh_; }
  const FlatLayout& layout() const { return layout_; }
  std::vector<Parameter>& parameters() { return parameters_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  const std::shared_ptr<const GroupTag>& tag() const { return const_tag_; }

  at::ScalarType dtype() const { return dtype_; } // at rest
  at::ScalarType compute_dtype() const { return compute_dtype_; }
  at::ScalarType reduce_dtype() const { return reduce_dtype_; }
  c10::Device device() const { return device_; }
  bool replicated() const { return settings_.strategy == Strategy::kNoShard; }
  /// Whether this rank's shard is the one that counts, of all its replicas.
  bool is_first_replica() const { return settings_.rank < mesh_.shards; }
  /// The shape of parameter `index` outside of regions.
  std::vector<int64_t> sizes_at_rest(int64_t index) const;
  /// Position of this rank in the layout.
  int position() const { return replicated() ? 0 : mesh_.position; }

  /// Takes over parameters whose contents the program replaced (set_data,
  /// torch::load). Throws for a size or dtype that does not fit; that parameter
  /// is left as it is, and the program can take it back.
  void adopt_replaced();

  /// SHARDED to RELEASED, and back (which takes over what was replaced inside).
  void enter_region();
  void leave_region(Writes writes);

  /// SHARDED to ordinary whole tensors in the dtype at rest, in memory of their
  /// own, and back. Collective: opening.
  void open_whole();
  void close_whole(Writes writes);

  /// RELEASED to UNSHARDED: start_gather() issues, finish_gather() waits.
  void start_gather();
  void finish_gather();
  bool is_whole() const { return whole_ || plain_; }
  /// start_gather() was called, or has nothing to do.
  bool is_gathering() const { return gather_ != nullptr; }
  bool is_plain() const { return plain_; }

  /// UNSHARDED to RELEASED. Writes to whole weights reach this rank's slice.
  void release(KeepPart keep = KeepPart::kNo);
  /// The same, without keeping writes.
  void discard();
  /// The next gather is over all ranks again.
  void drop_part() { part_.reset(); }

  /// An operator is about to write to whole weights. What is there now is kept
  /// until the region closes, so that a failed one leaves no trace.
  void prepare_write();
  /// Brings writes to this rank's slice while the weights stay whole.
  void flush_writes();

  // Of shared slices, while weights are writable:
  /// Brings what regions have written to this rank's slice.
  void take_up_writes();
  /// Makes the shared slice equal to this rank's, where that has another type.
  void refresh_shared_slice();
  bool has_writes() const { return is_shared() && gathered_.defined(); }
  bool is_shared() const { return shared_ != nullptr; }
  /// Whether the program has replaced a parameter (set_data, torch::load).
  bool has_replaced() const;

  /// Bytes of this rank's slice, and of gathered weights that live now.
  int64_t shard_bytes() const;
  int64_t gathered_bytes() const;

  /// The parameter whose whole interval holds element `offset`, for messages.
  const std::string& name_at(int64_t offset) const;

 private:
  void allocate_shard();
  void copy_in_and_switch();
  /// Copies what the parameter holds now into this rank's slice.
  void take_over(int64_t index, at::ScalarType accepted);
  void check_replacement(int64_t index, at::ScalarType accepted) const;
  /// The same for a parameter that was replaced in a region.
  void take_over_in_region(int64_t index);
  void undo_writes(); // of this region
  void make_own_copy();
  void point_to_shared_slice(); // the shard
  void write_back();
  bool shard_is_shared() const {
    return is_shared() && compute_dtype_ == dtype_;
  }
  void* whole_data() const;
  void check_plain(const Parameter& parameter) const;
  /// This rank's part of `whole`, 1-D of all slices.
  at::Tensor own_slot(const at::Tensor& whole) const;
  void gather_into(const at::Tensor& whole);
  void drop_whole();
  void keep_part();
  at::Tensor part_of(const at::Tensor& whole) const;
  std::string where() const; // "unit 'layers.0', rank 1/2"

  Net& net_;
  Unit* unit_ = nullptr;
  size_t index_ = 0;
  GroupSettings settings_;
  std::vector<Parameter> parameters_;
  at::ScalarType dtype_;
  at::ScalarType compute_dtype_;
  at::ScalarType reduce_dtype_;
  c10::Device device_;
  FlatLayout layout_;
  std::shared_ptr<GroupTag> tag_;
  std::shared_ptr<const GroupTag> const_tag_;
  const Mesh& mesh_;
  std::shared_ptr<Communicator> part_communicator_; // null: no smaller groups
  SharedWeights* shared_ = nullptr;
  size_t shared_buffer_ = 0;
  /// The slice is the whole: no copy is needed to compute with it.
  bool alias_;
  /// Replicated, and computed with as it is: ordinary tensors in all states.
  bool plain_;

  c10::intrusive_ptr<UnitStorage> shard_storage_;
  c10::intrusive_ptr<UnitStorage> whole_storage_;
  at::Tensor shard_; // 1-D, this rank's slice
  /// 1-D, all slices; undefined while RELEASED. Of shared slices: the copy that
  /// this rank has written to, or undefined.
  at::Tensor gathered_;
  at::Tensor part_; // 1-D, while RELEASED: what is kept for the next gather
  // Before the first write of this region, so that it can be undone.
  bool wrote_in_region_ = false;
  at::Tensor shard_before_; // 1-D, the slice, unless it is shared
  at::Tensor copy_before_;  // 1-D, of shared slices: the copy, if there was one
  at::Tensor whole_at_rest_; // 1-D, while open_whole()
  std::unique_ptr<Work> gather_;
  std::string released_message_;
  bool whole_ = false;
  bool written_ = false;
};

} // namespace fsdp::detail
