#include "comm/shm_slices.h"

#include <atomic>
#include <utility>

namespace fsdp::detail {
namespace {

constexpr size_t kPage = 4096;

struct alignas(128) Header {
  std::atomic<uint32_t> members_gone; // written by all
};

size_t whole_pages(size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

} // namespace

struct alignas(128) ShmSlices::Line {
  std::atomic<uint64_t> published;
  std::atomic<uint64_t> retired;
};

size_t ShmSlices::bytes_for(std::span<const int64_t> slice_bytes, int ranks) {
  const auto count = static_cast<size_t>(ranks);
  size_t bytes = whole_pages(sizeof(Header) + count * sizeof(Line));
  for (const int64_t slice : slice_bytes) {
    bytes += whole_pages(count * static_cast<size_t>(slice));
  }
  return bytes;
}

ShmSlices::ShmSlices(
    std::shared_ptr<ShmGroup> group,
    size_t offset,
    std::span<const int64_t> slice_bytes)
    : group_(std::move(group)),
      offset_(offset),
      bytes_(bytes_for(slice_bytes, group_->size())) {
  size_t next = offset_ + bytes_for({}, group_->size());
  for (const int64_t slice : slice_bytes) {
    const auto bytes = static_cast<size_t>(slice);
    buffers_.push_back({next, bytes});
    next += whole_pages(static_cast<size_t>(group_->size()) * bytes);
  }
}

ShmSlices::~ShmSlices() {
  ShmHost& host = *group_->host();
  if (host.segment().forked()) {
    return;
  }
  auto& gone = host.at<Header>(offset_)->members_gone;
  if (gone.fetch_add(1) + 1 == static_cast<uint32_t>(group_->size())) {
    host.free(offset_, bytes_, group_->members().front());
  }
}

void ShmSlices::reserve() {
  for (const Buffer& buffer : buffers_) {
    const auto rank = static_cast<size_t>(group_->rank());
    group_->host()->segment().reserve(
        buffer.offset + rank * buffer.slice_bytes, buffer.slice_bytes);
  }
}

ShmSlices::Line& ShmSlices::line(int rank) const {
  return group_->host()->at<Line>(offset_ + sizeof(Header))[rank];
}

std::span<std::byte> ShmSlices::own(size_t buffer) {
  const auto& [offset, slice_bytes] = buffers_.at(buffer);
  const auto rank = static_cast<size_t>(group_->rank());
  return {group_->host()->at(offset + rank * slice_bytes), slice_bytes};
}

std::span<const std::byte> ShmSlices::whole(size_t buffer) {
  const auto& [offset, slice_bytes] = buffers_.at(buffer);
  return {
      group_->host()->segment().read_only_data() + offset,
      static_cast<size_t>(group_->size()) * slice_bytes};
}

void ShmSlices::add_one(std::atomic<uint64_t> Line::*count) {
  if (!group_->host()->segment().forked()) {
    ++(line(group_->rank()).*count);
    group_->ring();
  }
}

void ShmSlices::await(
    const std::string& what,
    std::atomic<uint64_t> Line::*count) const {
  group_->check_aborted(what);
  const uint64_t own = line(group_->rank()).*count;
  group_->await(what, [&](int rank) { return line(rank).*count >= own; });
}

void ShmSlices::publish() {
  add_one(&Line::published);
}

void ShmSlices::await_published(const std::string& what) {
  await(what, &Line::published);
}

void ShmSlices::retire() {
  add_one(&Line::retired);
}

void ShmSlices::await_retired(const std::string& what) {
  await(what, &Line::retired);
}

} // namespace fsdp::detail
