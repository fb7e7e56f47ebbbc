#pragma once

#include <fsdp/communicator.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace fsdp::detail {

class FlatGroup;
class Recipe;

/// The dispatch key that libtorch reserves for out-of-tree use. A tensor that
/// carries it is seen by the fallback of dispatch.cpp, and so are its views.
inline constexpr auto kTouchKey = c10::DispatchKey::DeferredInit;

enum class StorageKind : uint8_t {
  kWhole, // whole weights of a flat group; has memory only while they are used
  kShard, // this rank's slice
  kGradient, // gradients of this rank's slice, or of the whole group
  kDerived,  // a value that was computed only from weights
};

/// Lets storages that outlive their flat group find out that it is gone.
struct GroupTag {
  std::atomic<FlatGroup*> group{nullptr};
};

/// A storage that knows its flat group, so that an operator's argument leads to
/// the unit in O(1). Never resizable.
struct UnitStorage final : c10::StorageImpl {
  UnitStorage(
      StorageKind kind_of_memory,
      std::shared_ptr<const GroupTag> group_tag,
      size_t nbytes,
      c10::DataPtr data);

  const StorageKind kind;
  const std::shared_ptr<const GroupTag> tag;
  /// Of slices that others see: what they lie in.
  std::shared_ptr<SharedSlices> slices;
  /// Of gradients: autograd recorded how they were computed (create_graph), but
  /// a reduction over ranks has no graph.
  bool graph_dropped = false;
  /// Of derived values: how to compute it again. Null once it was written to.
  std::shared_ptr<const Recipe> recipe;
  size_t recipe_output = 0;
};

/// The storage of `tensor` if it is one of ours, else null.
UnitStorage* unit_storage(const at::Tensor& tensor);

/// A storage of `nbytes` bytes of memory (uninitialised) on `device`.
c10::intrusive_ptr<UnitStorage> allocate_storage(
    StorageKind kind,
    std::shared_ptr<const GroupTag> tag,
    size_t nbytes,
    c10::Device device);

/// A storage on the memory of `tensor`, which is contiguous; it keeps that.
c10::intrusive_ptr<UnitStorage> storage_around(
    StorageKind kind,
    std::shared_ptr<const GroupTag> tag,
    const at::Tensor& tensor);

/// A storage on this rank's slice of `buffer`; it keeps `slices` alive.
c10::intrusive_ptr<UnitStorage> storage_on_slice(
    StorageKind kind,
    std::shared_ptr<const GroupTag> tag,
    std::shared_ptr<SharedSlices> slices,
    size_t buffer);

/// Takes the memory away. Until give_memory() every raw access throws
/// `message`; nbytes() stays, since views are made while there is no memory.
void take_memory(UnitStorage& storage, const std::string& message);

/// Lets `storage` point to `data`, which somebody else owns.
void give_memory(UnitStorage& storage, void* data);

/// Lets `storage` point to the memory of `tensor`, and keep that.
void point_to(UnitStorage& storage, const at::Tensor& tensor);

enum class Touched : uint8_t { kNo, kYes };

/// A contiguous tensor on the storage of `base`, without the touch key, that is
/// no view for autograd.
at::Tensor tensor_on_storage_of(
    const at::Tensor& base,
    at::ScalarType dtype,
    at::IntArrayRef sizes,
    int64_t offset_numel);

/// The elements of a contiguous tensor as such a tensor of one dimension.
at::Tensor flattened(const at::Tensor& tensor);

/// A contiguous tensor on `storage`, with the touch key or without.
at::Tensor tensor_on(
    const c10::intrusive_ptr<UnitStorage>& storage,
    at::ScalarType dtype,
    at::IntArrayRef sizes,
    int64_t offset_numel,
    Touched touched);

} // namespace fsdp::detail
