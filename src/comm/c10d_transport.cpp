#include "comm/c10d_transport.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <utility>

namespace fsdp::detail {
namespace {

at::Tensor transport_part(
    const at::Tensor& whole,
    const std::vector<int64_t>& cuts,
    int rank) {
  const auto r = static_cast<size_t>(rank);
  return c10d_tensor_over(c10d_bytes_of(whole).subspan(
      static_cast<size_t>(cuts[r]),
      static_cast<size_t>(cuts[r + 1] - cuts[r])));
}

/// All `bytes` for one rank, nothing for the others.
std::vector<int64_t> bytes_for(int rank, int64_t bytes, int size) {
  std::vector<int64_t> counts(static_cast<size_t>(size), 0);
  counts[static_cast<size_t>(rank)] = bytes;
  return counts;
}

} // namespace

at::Tensor c10d_tensor_over(std::span<std::byte> memory) {
  return at::from_blob(memory.data(), {std::ssize(memory)}, at::kByte);
}

at::Tensor c10d_new_bytes(size_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)}, at::kByte);
}

std::span<std::byte> c10d_bytes_of(const at::Tensor& tensor) {
  return {
      static_cast<std::byte*>(tensor.data_ptr()),
      static_cast<size_t>(tensor.numel())};
}

C10dTransport::C10dTransport(
    C10dBackendPtr backend,
    int rank,
    int size,
    std::chrono::milliseconds timeout)
    : backend_(std::move(backend)),
      tagged_(dynamic_cast<TaggedBackend*>(backend_.get())),
      rank_(rank),
      size_(size),
      timeout_(longer_than(timeout)) {
}

void C10dTransport::gather(const at::Tensor& whole, C10dWorks& works) {
  const auto bytes = c10d_bytes_of(whole);
  const size_t slice = bytes.size() / static_cast<size_t>(size_);
  at::Tensor output = whole;
  at::Tensor input = c10d_tensor_over(
      bytes.subspan(static_cast<size_t>(rank_) * slice, slice));
  c10d::AllgatherOptions options;
  options.timeout = timeout_;
  tag_next();
  works.push_back(backend_->_allgather_base(output, input, options));
}

void C10dTransport::gather_parts(
    const at::Tensor& whole,
    const std::vector<int64_t>& cuts,
    C10dWorks& works) {
  const at::Tensor own = transport_part(whole, cuts, rank_);
  for (int distance = 1; distance < size_; ++distance) {
    const int to = (rank_ + distance) % size_;
    const int from = (rank_ + size_ - distance) % size_;
    const at::Tensor theirs = transport_part(whole, cuts, from);
    works.push_back(all_to_all(
        own,
        bytes_for(to, own.numel(), size_),
        theirs,
        bytes_for(from, theirs.numel(), size_)));
  }
}

void C10dTransport::scatter_parts(
    const at::Tensor& input,
    const std::vector<int64_t>& cuts,
    const at::Tensor& output,
    C10dWorks& works) {
  std::vector<int64_t> input_bytes;
  for (size_t r = 0; r + 1 < cuts.size(); ++r) {
    input_bytes.push_back(cuts[r + 1] - cuts[r]);
  }
  const std::vector<int64_t> output_bytes(
      input_bytes.size(), input_bytes[static_cast<size_t>(rank_)]);
  works.push_back(
      all_to_all(input, std::move(input_bytes), output, output_bytes));
}

void C10dTransport::broadcast(
    const at::Tensor& tensor,
    int root,
    C10dWorks& works) {
  std::vector<at::Tensor> tensors = {tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  options.timeout = timeout_;
  tag_next();
  works.push_back(backend_->broadcast(tensors, options));
}

c10::intrusive_ptr<c10d::Work> C10dTransport::all_to_all(
    at::Tensor input,
    std::vector<int64_t> input_bytes,
    at::Tensor output,
    std::vector<int64_t> output_bytes) {
  c10d::AllToAllOptions options;
  options.timeout = timeout_;
  tag_next();
  return backend_->alltoall_base(
      output, input, output_bytes, input_bytes, options);
}

// The count keeps collectives apart that are in flight at once, the hash those
// of ranks that call different things.
void C10dTransport::tag_next() {
  constexpr int kHashBits = 20;
  if (tagged_ != nullptr) {
    const auto folded =
        static_cast<uint32_t>((hash_ ^ (hash_ >> 23) ^ (hash_ >> 44)));
    tagged_->set_next_tag(
        (count_ << kHashBits) | (folded & ((1u << kHashBits) - 1)));
  }
  ++count_;
}

} // namespace fsdp::detail
