#include "runtime/unit_storage.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <torch/version.h>

#include <utility>

namespace fsdp::detail {

namespace {

/// Its address marks our storages. It can allocate, like any allocator, but
/// nothing asks it to: the storages cannot be resized.
class TagAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    return c10::GetCPUAllocator()->allocate(nbytes);
  }
  void copy_data(void* dest, const void* src, std::size_t count)
      const override {
    default_copy_data(dest, src, count);
  }
};

TagAllocator& tag_allocator() {
  static auto* allocator = new TagAllocator; // outlives every storage
  return *allocator;
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
// Before torch 2.13 there is a setter of this flag and no way back. An explicit
// instantiation may name a private member.
template <bool c10::StorageImpl::*Flag>
struct ThrowFlag {
  friend bool& throw_flag(c10::StorageImpl& storage) { return storage.*Flag; }
};
bool& throw_flag(c10::StorageImpl& storage);
template struct ThrowFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

void unlock(c10::StorageImpl& storage) {
  throw_flag(storage) = false;
}
#else
void unlock(c10::StorageImpl& storage) {
  storage.clear_data_ptr_access_error_msg_();
}
#endif

/// The memory of `tensor`, and what keeps it.
c10::DataPtr kept_memory(const at::Tensor& tensor) {
  return {
      tensor.data_ptr(),
      new at::Tensor(tensor),
      [](void* owner) { delete static_cast<at::Tensor*>(owner); },
      tensor.device()};
}

at::Tensor contiguous_on(
    c10::Storage storage,
    at::ScalarType dtype,
    at::IntArrayRef sizes,
    int64_t offset_numel,
    Touched touched) {
  auto keys = c10::DispatchKeySet(
      c10::computeDispatchKey(dtype, c10::kStrided, storage.device()));
  if (touched == Touched::kYes) {
    keys = keys.add(kTouchKey);
  }
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), keys, c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset_numel);
  return tensor;
}

} // namespace

UnitStorage::UnitStorage(
    StorageKind kind_of_memory,
    std::shared_ptr<const GroupTag> group_tag,
    size_t nbytes,
    c10::DataPtr data)
    : c10::StorageImpl(
          use_byte_size_t(),
          static_cast<int64_t>(nbytes),
          std::move(data),
          &tag_allocator(),
          /*resizable=*/false),
      kind(kind_of_memory),
      tag(std::move(group_tag)) {
}

UnitStorage* unit_storage(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) {
    return nullptr;
  }
  auto* storage =
      tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr || storage->allocator() != &tag_allocator()) {
    return nullptr;
  }
  return static_cast<UnitStorage*>(storage);
}

c10::intrusive_ptr<UnitStorage> allocate_storage(
    StorageKind kind,
    std::shared_ptr<const GroupTag> tag,
    size_t nbytes,
    c10::Device device) {
  return c10::make_intrusive<UnitStorage>(
      kind,
      std::move(tag),
      nbytes,
      c10::GetAllocator(device.type())->allocate(nbytes));
}

c10::intrusive_ptr<UnitStorage> storage_on_slice(
    StorageKind kind,
    std::shared_ptr<const GroupTag> tag,
    std::shared_ptr<SharedSlices> slices,
    size_t buffer) {
  const auto own = slices->own(buffer);
  auto storage = c10::make_intrusive<UnitStorage>(
      kind,
      std::move(tag),
      own.size(),
      c10::DataPtr(own.data(), c10::Device(c10::kCPU)));
  storage->slices = std::move(slices);
  return storage;
}

c10::intrusive_ptr<UnitStorage> storage_around(
    StorageKind kind,
    std::shared_ptr<const GroupTag> tag,
    const at::Tensor& tensor) {
  return c10::make_intrusive<UnitStorage>(
      kind, std::move(tag), tensor.nbytes(), kept_memory(tensor));
}

void point_to(UnitStorage& storage, const at::Tensor& tensor) {
  storage.set_data_ptr_noswap(kept_memory(tensor));
}

void take_memory(UnitStorage& storage, const std::string& message) {
  const auto device = storage.device();
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, device));
}

void give_memory(UnitStorage& storage, void* data) {
  const auto device = storage.device();
  unlock(storage);
  storage.set_data_ptr_noswap(c10::DataPtr(data, device));
}

at::Tensor tensor_on_storage_of(
    const at::Tensor& base,
    at::ScalarType dtype,
    at::IntArrayRef sizes,
    int64_t offset_numel) {
  return contiguous_on(
      base.storage(), dtype, sizes, offset_numel, Touched::kNo);
}

at::Tensor flattened(const at::Tensor& tensor) {
  return tensor_on_storage_of(
      tensor, tensor.scalar_type(), {tensor.numel()}, tensor.storage_offset());
}

at::Tensor tensor_on(
    const c10::intrusive_ptr<UnitStorage>& storage,
    at::ScalarType dtype,
    at::IntArrayRef sizes,
    int64_t offset_numel,
    Touched touched) {
  return contiguous_on(
      c10::Storage(storage), dtype, sizes, offset_numel, touched);
}

} // namespace fsdp::detail
