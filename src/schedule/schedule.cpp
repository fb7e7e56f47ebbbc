#include "schedule/schedule.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace fsdp::detail {
namespace {

// How many expected touches are looked at for units that are not whole: bounds
// the cost of a touch where few units take turns many times.
constexpr size_t kReach = 32;

size_t checked_slots(int64_t slots) {
  if (slots < 1) {
    throw std::invalid_argument(
        "Schedule: the number of slots is too small: expected at least 1, but "
        "got " +
        std::to_string(slots) + ". Pass Options::slots.");
  }
  return static_cast<size_t>(slots);
}

} // namespace

Schedule::Schedule(size_t units, int64_t slots)
    : slots_(checked_slots(slots)),
      states_(units),
      kinds_{
          Kind{
              RecordedPasses(units),
              std::vector<std::vector<uint32_t>>(units)},
          Kind{
              RecordedPasses(units),
              std::vector<std::vector<uint32_t>>(units)}} {
  decision_.release.reserve(units);
  decision_.gather.reserve(units);
  decision_.prefetch.reserve(units);
  requested_.reserve(units);
}

Schedule::UnitState& Schedule::checked(uint32_t unit, const char* who) {
  if (unit >= states_.size()) {
    throw std::invalid_argument(
        "Schedule::" + std::string(who) +
        ": the unit index is out of range: expected less than " +
        std::to_string(states_.size()) + ", but got " + std::to_string(unit) +
        ". Pass the index of a unit of this net.");
  }
  return states_[unit];
}

void Schedule::set_prefetch(
    PassKind kind,
    uint32_t unit,
    std::vector<uint32_t> ahead) {
  checked(unit, "set_prefetch");
  for (const auto each : ahead) {
    checked(each, "set_prefetch");
  }
  kinds_[static_cast<size_t>(kind)].rules[unit] = std::move(ahead);
}

// Passes.

void Schedule::begin_pass(PassKind kind) {
  if (kind_ != nullptr) {
    kind_->passes.end();
  }
  stop_pass();
  kind_ = &kinds_[static_cast<size_t>(kind)];
  if (kind == PassKind::kBackward) {
    const auto& forward = kinds_[static_cast<size_t>(PassKind::kForward)];
    kind_->passes.guess_reverse_of(forward.passes.latest());
  }
  kind_->passes.begin();
  pass_began_ = clock_;
}

const Decision& Schedule::end_pass() {
  if (kind_ != nullptr) {
    kind_->passes.end();
  }
  stop_pass();
  for (auto& state : states_) {
    state.pins = 0;
  }
  return release_all(/*with_kept=*/false);
}

const Decision& Schedule::fail_pass() {
  stop_pass();
  for (auto& kind : kinds_) {
    kind.passes.clear();
  }
  return release_all(/*with_kept=*/true);
}

void Schedule::reset() {
  for (auto& state : states_) {
    state.pins = 0;
  }
  fail_pass();
}

void Schedule::stop_pass() {
  kind_ = nullptr;
  for (const auto unit : requested_) {
    states_[unit].requested = false;
  }
  requested_.clear();
  previous_ = kNone;
  last_ = kNone;
}

const Decision& Schedule::release_all(bool with_kept) {
  decision_.clear();
  for (uint32_t unit = 0; unit < states_.size(); ++unit) {
    auto& state = states_[unit];
    if (state.whole && state.pins == 0 && (with_kept || !state.kept)) {
      decision_.release.push_back(unit);
    }
  }
  carry_out();
  return decision_;
}

void Schedule::keep(uint32_t unit, bool kept) {
  checked(unit, "keep").kept = kept;
}

void Schedule::set_whole(uint32_t unit, bool whole) {
  auto& state = checked(unit, "set_whole");
  state.whole = whole;
  state.ahead = false;
  if (last_ == unit) {
    last_ = kNone;
  }
}

// Touches.

void Schedule::unpin(std::span<const uint32_t> units) {
  for (const auto unit : units) {
    auto& pins = checked(unit, "unpin").pins;
    pins = std::max(0, pins - 1); // reset() may have come between
  }
}

const Decision& Schedule::decide(std::span<const uint32_t> units) {
  for (const auto unit : units) {
    ++checked(unit, "touch").pins;
  }
  const bool alone = std::all_of(units.begin(), units.end(), [&](auto unit) {
    return unit == units.front();
  });
  if (units.empty() || (alone && units.front() == last_)) {
    return nothing_;
  }
  decision_.clear();
  const auto read = note_touches(units, alone);
  const auto left = look_ahead(slots_ > read ? slots_ - read : 0);
  if (!decision_.empty()) {
    make_room(left);
    carry_out();
  }
  last_ = alone ? units.front() : kNone;
  return decision_;
}

// Returns how many different units there are.
size_t Schedule::note_touches(std::span<const uint32_t> units, bool alone) {
  decision_began_ = clock_;
  by_rule_ = false;
  size_t read = 0;
  for (const auto unit : units) {
    auto& state = states_[unit];
    if (is_read(state)) {
      continue; // it is there twice
    }
    const bool first = state.last_touch <= pass_began_;
    state.last_touch = ++clock_;
    state.ahead = false;
    withdraw_request(unit);
    if (!state.whole) {
      decision_.gather.push_back(unit);
    }
    // What is recorded depends on touches alone, not on what is whole.
    if (kind_ != nullptr && !(alone && unit == previous_)) {
      kind_->passes.touch({unit, read > 0});
      previous_ = unit;
    }
    if (kind_ != nullptr && first) {
      apply_rule(unit);
    }
    ++read;
  }
  return read;
}

void Schedule::apply_rule(uint32_t unit) {
  for (const auto each : kind_->rules[unit]) {
    auto& state = states_[each];
    by_rule_ = true;
    if (!state.requested && !is_read(state)) {
      state.requested = true;
      requested_.push_back(each);
    }
  }
}

void Schedule::withdraw_request(uint32_t unit) {
  if (std::exchange(states_[unit].requested, false)) {
    requested_.erase(std::find(requested_.begin(), requested_.end(), unit));
  }
}

// Marks the units that are expected next, and starts the gathers of those that
// are not whole. Returns how many of `places` are left for other units.
size_t Schedule::look_ahead(size_t places) {
  const auto consider = [&](uint32_t unit, bool may_start) {
    auto& state = states_[unit];
    const bool needs_no_place =
        is_read(state) || (state.whole && !state.takes_slot());
    if (needs_no_place || state.wanted == decision_began_ ||
        (!state.whole && !may_start)) {
      return;
    }
    state.wanted = decision_began_;
    --places;
    if (!state.whole) {
      decision_.prefetch.push_back(unit);
    }
  };
  for (size_t i = 0; i < requested_.size() && places > 0; ++i) {
    consider(requested_[i], true);
  }
  if (kind_ != nullptr) {
    const auto ahead = kind_->passes.ahead();
    const auto reach = std::min(ahead.size(), kReach);
    for (size_t i = 0; i < reach && places > 0; ++i) {
      consider(ahead[i].unit, !by_rule_);
    }
  }
  return places;
}

// Leaves at most `places` units beside those that this operator reads and those
// that are expected next.
void Schedule::make_room(size_t places) {
  auto& units = decision_.release;
  for (uint32_t unit = 0; unit < states_.size(); ++unit) {
    const auto& state = states_[unit];
    if (state.takes_slot() && state.wanted != decision_began_) {
      units.push_back(unit);
    }
  }
  if (units.size() <= places) {
    units.clear();
    return;
  }
  const auto claim = [&](uint32_t unit) {
    const auto& state = states_[unit];
    return std::make_tuple(!state.ahead, state.last_touch, unit);
  };
  std::sort(units.begin(), units.end(), [&](uint32_t a, uint32_t b) {
    return claim(a) < claim(b);
  });
  units.resize(units.size() - places);
}

void Schedule::carry_out() {
  for (const auto unit : decision_.release) {
    states_[unit].whole = false;
  }
  for (const auto unit : decision_.gather) {
    states_[unit].whole = true;
  }
  for (const auto unit : decision_.prefetch) {
    states_[unit].whole = true;
    states_[unit].ahead = true;
  }
}

} // namespace fsdp::detail
