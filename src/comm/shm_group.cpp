#include "comm/shm_group.h"

#include "comm/call_codec.h"

#include <fsdp/communicator.h>

#include <algorithm>
#include <utility>

namespace fsdp::detail {
namespace {

constexpr size_t kPayloadAlignment = 64;
// In front of a contribution, unless its call has a name of that length.
constexpr size_t kRoomForHeader = size_t{4} << 10;

size_t padded(size_t bytes) {
  return (bytes + kPayloadAlignment - 1) / kPayloadAlignment *
      kPayloadAlignment;
}

std::string title_of(const Call& call) {
  return title_of(call.kind, call.what);
}

void copy_shared_bytes(std::byte* to, const ShmContribution& from) {
  copy_pieces(to, from.pieces, 0, from.skip_begin, from.stores);
  copy_pieces(
      to + from.skip_begin, from.pieces, from.skip_end, from.size, from.stores);
}

} // namespace

size_t ShmGroup::control_bytes(int size) {
  return sizeof(ShmGroupHeader) +
      static_cast<size_t>(size) * sizeof(ShmRankLine);
}

ShmGroup::ShmGroup(
    std::shared_ptr<ShmHost> host,
    size_t control_offset,
    std::vector<int> members,
    int rank)
    : host_(std::move(host)),
      control_offset_(control_offset),
      members_(std::move(members)),
      rank_(rank),
      lines_(host_->at<ShmRankLine>(control_offset + sizeof(ShmGroupHeader))),
      arena_(host_, [this](uint64_t epoch, uint64_t call) {
        return all_have_passed(epoch, call);
      }) {
  host_->add_group(this, [this] { return advance_meanwhile(); });
}

ShmGroup::~ShmGroup() {
  host_->remove_group(this);
  if (host_->segment().forked()) {
    return;
  }
  leave(ShmGone::kGone);
  mine().reads_no_more = 1;
  arena_.close();
  auto& gone = host_->at<ShmGroupHeader>(control_offset_)->members_gone;
  if (gone.fetch_add(1) + 1 == static_cast<uint32_t>(size())) {
    host_->free(control_offset_, control_bytes(size()), members_.front());
  }
}

// What peers have done.

bool ShmGroup::has_passed(int peer, uint64_t epoch, uint64_t call) const {
  const ShmRankLine& its = line(peer);
  const uint64_t its_epoch = its.epoch;
  // Should its epoch end in between, `taken` is that of a later one or 0.
  return its_epoch > epoch || (its_epoch == epoch && its.taken > call) ||
      its.reads_no_more != 0;
}

bool ShmGroup::all_have_passed(uint64_t epoch, uint64_t call) const {
  for (int r = 0; r < size(); ++r) {
    if (r != rank_ && !has_passed(r, epoch, call)) {
      return false;
    }
  }
  return true;
}

bool ShmGroup::has_contributed(int peer, uint64_t call) const {
  const ShmRankLine& its = line(peer);
  if (its.epoch == epoch_) {
    const uint64_t contributed = its.contributed;
    if (its.epoch == epoch_) { // they are of this epoch, then
      return contributed > epoch_of(peer).first + call;
    }
  }
  return its.epoch > epoch_ && epoch_of(peer).calls > call;
}

const ShmDescriptor& ShmGroup::descriptor_of(int peer, uint64_t call) const {
  const uint64_t contribution = epoch_of(peer).first + call;
  return line(peer).calls[contribution % ShmRankLine::kCalls];
}

std::string_view ShmGroup::header_of(int peer, uint64_t call) const {
  const auto& descriptor = descriptor_of(peer, call);
  return {
      host_->at<char>(descriptor.header_offset),
      static_cast<size_t>(descriptor.header_bytes)};
}

std::string ShmGroup::failure_of(uint64_t call) const {
  for (int r = 0; r < size(); ++r) {
    if (r != rank_ && line(r).epoch > epoch_) {
      if (epoch_of(r).calls <= call) {
        return epoch_of(r).failure.load();
      }
    }
  }
  return {};
}

std::string ShmGroup::difference_at(const ShmOperation& operation) const {
  std::optional<int> first;
  std::string_view expected;
  for (int r = 0; r < size(); ++r) {
    if (!(r == rank_ || has_contributed(r, operation.number))) {
      continue;
    }
    const std::string_view header = r == rank_
        ? std::string_view(operation.header)
        : header_of(r, operation.number);
    if (!first) {
      first = r;
      expected = header;
    } else if (header != expected) {
      return "ranks differ: " +
          difference_text(
                 decode_call(header),
                 r,
                 decode_call(expected),
                 *first,
                 size()) +
          ". All ranks must call the same collectives in the same order.";
    }
  }
  return {};
}

// Calls of this rank.

ShmGroup::Operation ShmGroup::issue(ShmOperation operation) {
  const std::lock_guard lock(mutex_);
  const std::string title = title_of(operation.call);
  check_aborted(title);
  const std::string failure = failure_of(made_);
  if (!failure.empty()) {
    fail(failure);
  }
  operation.header = encode_call(operation.call);
  operation.number = made_++;
  mine().last_call.store(title);
  operations_.push_back(std::make_shared<ShmOperation>(std::move(operation)));
  const Operation made = operations_.back();
  const std::string problem = contribute_all();
  if (!problem.empty()) {
    fail(problem);
  }
  return made;
}

bool ShmGroup::contribute(ShmOperation& operation) {
  const uint64_t slot = (first_ + contributed_) % ShmRankLine::kCalls;
  auto& described = described_[slot];
  if ((operation.follows && operations_.front().get() != &operation) ||
      (described && !all_have_passed(described->first, described->second))) {
    return false;
  }
  const ShmContribution contribution = operation.contribution();
  const size_t header_bytes = padded(operation.header.size());
  const auto offset = arena_.add(
      header_bytes + contribution.shared_bytes(), epoch_, operation.number);
  if (!offset) {
    return false;
  }
  operation.header.copy(host_->at<char>(*offset), operation.header.size());
  copy_shared_bytes(host_->at(*offset + header_bytes), contribution);
  mine().calls[slot] = {
      *offset,
      operation.header.size(),
      *offset + header_bytes,
      contribution.shared_bytes()};
  described = {epoch_, operation.number};
  operation.contributed = true;
  mine().contributed = first_ + ++contributed_;
  wake(/*all=*/false);
  return true;
}

std::string ShmGroup::contribute_all() {
  for (const Operation& operation : operations_) {
    try {
      if (!operation->contributed && !contribute(*operation)) {
        break; // in order
      }
    } catch (const CommunicationError& error) {
      return rank_text(rank_, size()) +
          " failed: " + title_of(operation->call) + ": " + error.what();
    }
  }
  return {};
}

void ShmGroup::deliver(ShmOperation& operation) {
  if (operation.deliver) {
    ShmPayloads payloads;
    for (int r = 0; r < size(); ++r) {
      if (r == rank_) {
        const auto own = operation.contribution().pieces;
        payloads.push_back(
            own.size() == 1 ? own.front().bytes : std::span<const std::byte>());
        continue;
      }
      const auto& descriptor = descriptor_of(r, operation.number);
      payloads.emplace_back(
          host_->at(descriptor.payload_offset), descriptor.payload_bytes);
    }
    operation.deliver(payloads);
  }
  operation.is_over = true;
  mine().taken = ++taken_;
  wake(/*all=*/false);
}

std::string ShmGroup::advance() {
  while (true) {
    const std::string problem = contribute_all();
    if (!problem.empty() || operations_.empty()) {
      return problem;
    }
    const Operation first = operations_.front();
    // Before the comparison, so that what is taken has been compared.
    const bool have_all_come =
        first->contributed && !first_missing([&](int peer) {
          return has_contributed(peer, first->number);
        });
    std::string failure = failure_of(first->number);
    if (failure.empty() && first->contributed) {
      failure = difference_at(*first);
    }
    if (!failure.empty() || !have_all_come) {
      return failure;
    }
    deliver(*first);
    operations_.pop_front();
  }
}

bool ShmGroup::advance_meanwhile() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || operations_.empty()) {
    return false; // another thread is at it, or there is nothing to do
  }
  static_cast<void>(advance()); // who waits here will meet the failure again
  return !operations_.empty();
}

bool ShmGroup::ready(const Operation& operation) {
  const std::lock_guard lock(mutex_);
  if (operation->is_over || !host_->aborted().empty() || !advance().empty() ||
      operation->is_over) {
    return true;
  }
  return is_gone_for_good(waiting_for_first(Clock::now()));
}

void ShmGroup::wait(const Operation& operation) {
  Lock lock(mutex_);
  const auto start = Clock::now();
  while (true) {
    if (operation->is_over && !operation->failure.empty()) {
      throw CommunicationError(operation->failure);
    }
    if (operation->is_over) {
      return;
    }
    check_aborted(title_of(operation->call));
    const std::string failure = advance();
    if (operation->is_over) {
      continue; // even if a later call fails
    }
    if (!failure.empty()) {
      fail(failure);
    }
    const Waiting waiting = waiting_for_first(start);
    const uint64_t first = operations_.front()->number;
    wait_for(lock, waiting, [&] {
      return operation->is_over || waiting.has_come(waiting.peer) ||
          !failure_of(first).empty();
    });
  }
}

ShmGroup::Waiting ShmGroup::waiting_for_first(Clock::time_point start) const {
  const ShmOperation& first = *operations_.front();
  Waiting waiting;
  waiting.title = title_of(first.call);
  waiting.start = start;
  waiting.calls = first.number;
  if (first.contributed) {
    waiting.has_come = [this, number = first.number](int peer) {
      return has_contributed(peer, number);
    };
  } else { // for want of room: all calls before it are taken here
    waiting.has_come = [this](int peer) {
      return taken_ > 0 ? has_passed(peer, epoch_, taken_ - 1)
                        : line(peer).epoch >= epoch_;
    };
  }
  waiting.peer = first_missing(waiting.has_come).value_or(rank_);
  return waiting;
}

void ShmGroup::abandon(
    const Operation& operation,
    const std::function<void()>& detach) {
  const std::lock_guard lock(mutex_);
  if (!operation->is_over) {
    detach();
  }
}

void ShmGroup::reserve(size_t bytes) {
  const std::lock_guard lock(mutex_);
  check_aborted("memory for contributions");
  arena_.reserve(bytes + kRoomForHeader);
}

// Failures.

uint64_t ShmGroup::epoch() {
  const std::lock_guard lock(mutex_);
  return epoch_;
}

void ShmGroup::end_epoch(const std::string& failure) {
  const std::lock_guard lock(mutex_);
  if (!host_->segment().forked()) {
    go_on(failure, contributed_);
  }
}

void ShmGroup::fail(const std::string& failure) {
  go_on(failure, contributed_);
  throw CommunicationError(failure);
}

void ShmGroup::go_on(const std::string& failure, uint64_t calls) {
  for (const Operation& operation : std::exchange(operations_, {})) {
    operation->failure = failure;
    operation->is_over = true;
  }
  await_slowest();
  if (!host_->aborted().empty()) {
    return; // a peer may still read what would be written now
  }
  std::string text = failure;
  for (int r = 0; r < size(); ++r) { // the first failure of an epoch counts
    if (r != rank_ && line(r).epoch > epoch_) {
      text = epoch_of(r).failure.load();
    }
  }
  auto& epochs = mine().epochs;
  auto& ended = epochs[epoch_ % epochs.size()];
  ended.calls = calls;
  ended.failure.store(text);
  first_ += contributed_;
  epochs[(epoch_ + 1) % epochs.size()].first = first_;
  made_ = contributed_ = taken_ = 0;
  mine().taken = 0;
  mine().epoch = ++epoch_;
  wake(/*all=*/true);
}

void ShmGroup::check_aborted(const std::string& title) const {
  const std::string reason = host_->aborted();
  if (!reason.empty()) {
    throw CommunicationError(
        title + ": " + rank_text(rank_, size()) + ": " + reason);
  }
}

void ShmGroup::leave(ShmGone how) {
  const std::lock_guard lock(mutex_);
  if (host_->segment().forked() || mine().gone != ShmGone::kNo) {
    return;
  }
  mine().reads_no_more = operations_.empty() ? 1 : 0;
  mine().gone = how;
  wake(/*all=*/true);
}

bool ShmGroup::is_over() {
  const std::lock_guard lock(mutex_);
  for (int r = 0; r < size(); ++r) {
    if (line(r).gone == ShmGone::kNo) {
      return false;
    }
  }
  return arena_.is_empty();
}

} // namespace fsdp::detail
