#include "schedule/recorded_passes.h"

#include <algorithm>

namespace fsdp::detail {

void RecordedPasses::begin() {
  current_.clear();
  for (auto& pass : passes_) {
    pass.agrees = true;
  }
  followed_ = 0;
  position_ = 0;
  in_step_ = false;
}

void RecordedPasses::touch(UnitTouch touch) {
  if (current_.size() >= kLongest) {
    seek(touch.unit);
    return;
  }
  const auto place = current_.size();
  current_.push_back(touch);
  size_t first = passes_.size();
  for (size_t i = passes_.size(); i-- > 0;) {
    auto& pass = passes_[i];
    pass.agrees = pass.agrees && place < pass.touches.size() &&
        pass.touches[place].unit == touch.unit;
    first = pass.agrees ? i : first;
  }
  if (first == passes_.size()) {
    seek(touch.unit);
    return;
  }
  followed_ = first;
  position_ = place + 1;
  in_step_ = true;
}

// No recorded pass began as this one did: follows the one that was followed
// last, from wherever `unit` is touched in it.
void RecordedPasses::seek(uint32_t unit) {
  in_step_ = false;
  if (passes_.empty()) {
    return;
  }
  const auto& pass = passes_[followed_];
  const auto is_unit = [&](UnitTouch touch) { return touch.unit == unit; };
  const auto begin = pass.touches.begin();
  const auto from = begin + static_cast<std::ptrdiff_t>(position_);
  if (from != pass.touches.end() && is_unit(*from)) {
    ++position_;
    in_step_ = true;
    return;
  }
  if (pass.ends[unit] == 0) {
    return; // an insertion: what was expected may still come
  }
  const bool comes = pass.ends[unit] > position_;
  const auto found =
      std::find_if(comes ? from : begin, pass.touches.end(), is_unit);
  position_ = static_cast<size_t>(found - begin) + 1;
}

void RecordedPasses::end() {
  if (!current_.empty()) {
    auto place = find_recorded();
    if (place == passes_.size()) {
      place = place_for_new();
    }
    record(passes_.at(place));
    const auto from = passes_.begin() + static_cast<std::ptrdiff_t>(place);
    std::rotate(passes_.begin(), from, from + 1);
  }
}

size_t RecordedPasses::find_recorded() const {
  const auto found =
      std::find_if(passes_.begin(), passes_.end(), [&](const Pass& pass) {
        return pass.agrees && pass.touches.size() == current_.size();
      });
  return static_cast<size_t>(found - passes_.begin());
}
size_t RecordedPasses::place_for_new() {
  if (!passes_.empty() && passes_.front().guessed) {
    return 0; // it was wrong
  }
  if (passes_.size() < kRemembered) {
    passes_.emplace_back();
  }
  return passes_.size() - 1;
}

// Exchanges memory with `pass`: nothing is allocated in the steady state.
void RecordedPasses::record(Pass& pass) {
  pass.touches.swap(current_);
  pass.guessed = false;
  pass.ends.assign(units_, 0);
  for (size_t i = 0; i < pass.touches.size(); ++i) {
    pass.ends[pass.touches[i].unit] = static_cast<uint32_t>(i + 1);
  }
}

void RecordedPasses::clear() {
  passes_.clear();
  begin();
}

void RecordedPasses::guess_reverse_of(std::span<const UnitTouch> pass) {
  const bool recorded = !passes_.empty() && !passes_.front().guessed;
  if (recorded || pass.empty()) {
    return;
  }
  begin();
  for (size_t i = pass.size(); i-- > 0;) {
    current_.push_back({pass[i].unit, false});
  }
  end();
  passes_.front().guessed = true;
}

std::span<const UnitTouch> RecordedPasses::latest() const {
  return passes_.empty() || passes_.front().guessed
      ? std::span<const UnitTouch>()
      : passes_.front().touches;
}

std::span<const UnitTouch> RecordedPasses::ahead() const {
  return in_step_ ? std::span(passes_[followed_].touches).subspan(position_)
                  : std::span<const UnitTouch>();
}

} // namespace fsdp::detail
