#include "api/world_communicator.h"

#include "runtime/errors.h"

#include <algorithm>
#include <utility>

namespace fsdp::detail {

WorldMembers::WorldMembers(std::shared_ptr<WorldMembers> parent)
    : parent_(std::move(parent)) {
}

void WorldMembers::add(const std::shared_ptr<WorldCommunicator>& communicator) {
  if (parent_ != nullptr) {
    parent_->add(communicator);
  }
  const std::lock_guard lock(mutex_);
  std::erase_if(
      communicators_, [](const auto& each) { return each.expired(); });
  communicators_.push_back(communicator);
}

void WorldMembers::end() {
  const std::lock_guard lock(mutex_);
  for (const auto& each : communicators_) {
    if (const auto communicator = each.lock()) {
      communicator->let_go();
    }
  }
  communicators_.clear();
}

std::shared_ptr<WorldCommunicator> WorldCommunicator::make(
    std::shared_ptr<Communicator> inner,
    std::shared_ptr<WorldMembers> members) {
  std::shared_ptr<WorldCommunicator> made(
      new WorldCommunicator(std::move(inner), members));
  members->add(made);
  return made;
}

WorldCommunicator::WorldCommunicator(
    std::shared_ptr<Communicator> inner,
    std::shared_ptr<WorldMembers> members)
    : rank_(inner->rank()),
      size_(inner->size()),
      timeout_(inner->timeout()),
      members_(std::move(members)),
      inner_(std::move(inner)) {
}

void WorldCommunicator::let_go() {
  if (inner_ != nullptr) {
    last_epoch_ = inner_->epoch();
    inner_.reset();
  }
}

std::string WorldCommunicator::ended_text(const std::string& what) const {
  return rank_text(rank_, size_) + ": " + what +
      ": the world was shut down. Call World::shutdown() after the last use of"
      " the world and of nets made from it.";
}

Communicator& WorldCommunicator::open(const std::string& what) const {
  if (has_ended()) {
    throw CommunicationError(ended_text(what));
  }
  return *inner_;
}

std::unique_ptr<Work> WorldCommunicator::all_gather(
    std::span<std::byte> buffer,
    std::string what) {
  auto& inner = open(what);
  return inner.all_gather(buffer, std::move(what));
}

std::unique_ptr<Work> WorldCommunicator::reduce_scatter(
    std::span<const std::byte> input,
    std::span<std::byte> output,
    DType dtype,
    std::span<const int64_t> cuts,
    std::string what,
    ReduceOp op) {
  auto& inner = open(what);
  return inner.reduce_scatter(input, output, dtype, cuts, std::move(what), op);
}

std::unique_ptr<Work> WorldCommunicator::reduce_scatter_pieces(
    std::vector<Piece> input,
    std::span<std::byte> output,
    DType dtype,
    std::span<const int64_t> cuts,
    std::string what,
    ReduceOp op) {
  auto& inner = open(what);
  return inner.reduce_scatter_pieces(
      std::move(input), output, dtype, cuts, std::move(what), op);
}

std::unique_ptr<Work> WorldCommunicator::all_reduce(
    std::span<std::byte> buffer,
    DType dtype,
    ReduceOp op,
    std::string what) {
  auto& inner = open(what);
  return inner.all_reduce(buffer, dtype, op, std::move(what));
}

std::unique_ptr<Work> WorldCommunicator::all_reduce_pieces(
    std::vector<Piece> input,
    std::span<std::byte> output,
    DType dtype,
    ReduceOp op,
    std::string what) {
  auto& inner = open(what);
  return inner.all_reduce_pieces(
      std::move(input), output, dtype, op, std::move(what));
}

std::unique_ptr<Work> WorldCommunicator::broadcast(
    std::span<std::byte> buffer,
    int root,
    std::string what) {
  auto& inner = open(what);
  return inner.broadcast(buffer, root, std::move(what));
}

void WorldCommunicator::barrier(std::string what) {
  auto& inner = open(what);
  inner.barrier(std::move(what));
}

std::vector<std::string> WorldCommunicator::exchange(
    std::string_view mine,
    std::string what) {
  auto& inner = open(what);
  return inner.exchange(mine, std::move(what));
}

uint64_t WorldCommunicator::epoch() const {
  return has_ended() ? last_epoch_ : inner_->epoch();
}

// Regions that fail after the end say so too; nobody is left to hear it.
void WorldCommunicator::signal_failure(std::string_view message) {
  if (!has_ended()) {
    inner_->signal_failure(message);
  }
}

std::shared_ptr<Communicator> WorldCommunicator::split(int color, int key) {
  return make(open("split").split(color, key), members_);
}

std::shared_ptr<WorldCommunicator> WorldCommunicator::split_world(
    int color,
    int key,
    std::shared_ptr<WorldMembers> members) {
  return make(open("split").split(color, key), std::move(members));
}

std::string WorldCommunicator::aborted() const {
  return has_ended() ? ended_text("aborted") : inner_->aborted();
}

void WorldCommunicator::reserve(int64_t bytes) {
  open("reserve").reserve(bytes);
}

std::shared_ptr<SharedSlices> WorldCommunicator::share_slices(
    std::span<const int64_t> slice_bytes) {
  return open("share_slices").share_slices(slice_bytes);
}

} // namespace fsdp::detail
