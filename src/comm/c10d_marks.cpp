#include "comm/c10d_marks.h"

#include <algorithm>

namespace fsdp::detail {
namespace {

bool has_come(const WaitMark& theirs, const WaitMark& mine) {
  return theirs.channel == mine.channel &&
      (theirs.epoch > mine.epoch ||
       (theirs.epoch == mine.epoch && theirs.calls > mine.waits_for));
}

std::string place_of(const WaitMark& mark) {
  for (const auto& [number, call] : mark.open_calls) {
    if (number == mark.waits_for) {
      return " (waits in " + title_of(call.kind, call.what) + ")";
    }
  }
  return " (waits elsewhere)";
}

} // namespace

C10dMarks::C10dMarks(C10dStorePtr store, std::vector<int> world_ranks, int rank)
    : store_(std::move(store)),
      world_ranks_(std::move(world_ranks)),
      rank_(rank) {
}

void C10dMarks::write(const WaitMark& mark) {
  is_written_ = true;
  const auto world_rank = world_ranks_[static_cast<size_t>(rank_)];
  store_->set("mark/" + std::to_string(world_rank), encode(mark));
}

// Not deleteKey(): not every store has it.
void C10dMarks::erase() {
  if (is_written_) {
    try {
      write({});
    } catch (const std::exception&) {
      // The next look at the store says so.
    }
    is_written_ = false;
  }
}

std::optional<WaitMark> C10dMarks::of(int rank) {
  const auto world_rank = world_ranks_[static_cast<size_t>(rank)];
  const auto key = "mark/" + std::to_string(world_rank);
  if (!store_->check({key})) {
    return std::nullopt;
  }
  WaitMark mark = decode_mark(store_->get_to_str(key));
  return mark.calls == 0 ? std::nullopt : std::optional(std::move(mark));
}

std::optional<std::pair<uint64_t, std::string>> C10dMarks::difference(
    const WaitMark& mine) {
  const int size = static_cast<int>(world_ranks_.size());
  for (int r = 0; r < size; ++r) {
    const auto theirs = r == rank_ ? std::nullopt : of(r);
    if (!theirs || theirs->channel != mine.channel ||
        theirs->epoch != mine.epoch) {
      continue;
    }
    for (const auto& [number, call] : mine.open_calls) {
      for (const auto& [their_number, their_call] : theirs->open_calls) {
        if (number == their_number && call != their_call) {
          return std::pair(
              number, difference_of(call, rank_, their_call, r, size));
        }
      }
    }
  }
  return std::nullopt;
}

std::string C10dMarks::missing(const WaitMark& mine) {
  std::string text;
  int count = 0;
  for (int r = 0; r < static_cast<int>(world_ranks_.size()); ++r) {
    const auto theirs = of(r);
    if (r == rank_ || (theirs && has_come(*theirs, mine))) {
      continue;
    }
    text += (count++ == 0 ? "" : ", ") + std::to_string(r) +
        (theirs ? place_of(*theirs) : "");
  }
  return (count == 1 ? "rank " : "ranks ") + text;
}

} // namespace fsdp::detail
