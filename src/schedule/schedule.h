#pragma once

#include "schedule/recorded_passes.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fsdp::detail {

enum class PassKind : uint8_t { kForward, kBackward };

/// What is to be done, in this order: first all releases, then the gathers.
struct Decision {
  std::vector<uint32_t> release;
  /// The operator waits for these (and for those it reads whose gather was
  /// started ahead and goes on).
  std::vector<uint32_t> gather;
  /// Only started: before waiting for the gathers of this operator.
  std::vector<uint32_t> prefetch;

  void clear() {
    release.clear();
    gather.clear();
    prefetch.clear();
  }
  bool empty() const {
    return release.empty() && gather.empty() && prefetch.empty();
  }
};

/// Decides which units of a net are whole: what is gathered, what is gathered
/// ahead, and what is released. Units are named by their index.
///
/// [Note: Schedule] Gathers are collective, so all ranks must start the same
/// ones in the same order. Every decision is therefore a function of the calls
/// of this class, which are the same on all ranks; time, and which gathers have
/// ended, never count.
///
/// The first pass of a kind records the order of touches. Later passes follow
/// it: each touch starts the gathers of the next units of that order, as many
/// as `slots` leaves beside the units that this operator reads. Room is made
/// only when something is gathered. The units that are expected next stay, as
/// many as there are slots for; so those whose last touch of this pass is over
/// go before them. Of the others, units that were gathered ahead in vain go
/// first, then those that were touched least recently. Units with pins and kept
/// ones never go.
///
/// Forward and backward passes are recorded apart. The first backward pass
/// assumes the reverse of the forward pass before it. The last
/// RecordedPasses::kRemembered different passes of a kind are remembered, and a
/// pass follows the most recently run one that began with the same touches: so
/// a net that trains and evaluates, or is called by different functions in
/// turn, has a recorded pass for each, and none replaces another. All remain
/// candidates while they agree with the pass: where two part, only what was
/// gathered ahead of that touch may be in vain.
///
/// A pass that departs from all of them gathers at once what it touches, and
/// nothing ahead. It then looks for its place in the pass that it followed
/// last: where the touched unit comes next. One touch that was expected there
/// is enough to gather ahead again: so a pass that leaves out, repeats or
/// inserts something finds back. At its end it is recorded as a further pass.
///
/// A pass that fails is not recorded, and all that was recorded is forgotten:
/// ranks fail at different places, so one may have recorded a pass that another
/// has not.
///
/// Not safe for threads: the caller has a lock.
class Schedule {
 public:
  /// At most `slots` (at least 1) units are whole at once, beside units with
  /// pins and kept ones; or as many as one operator reads.
  /// Throws std::invalid_argument for fewer; so does every member for a unit
  /// that is none.
  Schedule(size_t units, int64_t slots);
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  /// When `unit` is first touched in a pass of `kind`, `ahead` is gathered,
  /// in this order, instead of what the recorded order says; what `slots` has
  /// no room for follows with the next touches. An empty list removes the rule.
  void set_prefetch(PassKind kind, uint32_t unit, std::vector<uint32_t> ahead);

  /// A pass begins, and the one before it ends if it is still open (a backward
  /// pass inside of a forward region): it is recorded, nothing is released.
  /// Passes do not nest: recomputation is part of the backward pass.
  void begin_pass(PassKind kind);

  /// An operator is about to read `units`; some may be there twice.
  /// They have pins until unpin() of the same list. What is returned is valid
  /// until the next call. Outside of a pass nothing is recorded or expected.
  const Decision& touch(std::span<const uint32_t> units) {
    if (units.size() == 1 && units.front() == last_) {
      ++states_[last_].pins;
      return nothing_;
    }
    return decide(units);
  }
  void unpin(std::span<const uint32_t> units);

  /// The pass ends well and is recorded. All units without keep() are to be
  /// released; no pins are left.
  const Decision& end_pass();

  /// The pass failed: forgets what was recorded. All units without pins are to
  /// be released, kept ones too, as ranks may differ in what is whole.
  const Decision& fail_pass();

  /// The same, when the caller has discarded all units: no pins are left.
  void reset();

  /// The touches of the pass of `kind` that was recorded last; empty when there
  /// is none. Valid until the next pass ends.
  std::span<const UnitTouch> recorded(PassKind kind) const {
    return kinds_[static_cast<size_t>(kind)].passes.latest();
  }

  /// A kept unit is not released, and takes none of the slots.
  void keep(uint32_t unit, bool kept);

  /// The caller has gathered or released `unit` on its own account.
  void set_whole(uint32_t unit, bool whole);
  bool is_whole(uint32_t unit) const { return states_.at(unit).whole; }

 private:
  struct UnitState {
    bool whole = false; // or on its way
    bool kept = false;
    bool ahead = false;     // where whole: gathered ahead, not touched since
    bool requested = false; // it is in requested_
    int pins = 0;
    uint64_t last_touch = 0; // by clock_; units of one operator differ
    uint64_t wanted = 0;     // last decision (by clock_) that expects it

    bool takes_slot() const { return whole && !kept && pins == 0; }
  };

  struct Kind {
    RecordedPasses passes;
    std::vector<std::vector<uint32_t>> rules; // by unit: what is gathered ahead
  };

  static constexpr uint32_t kNone = UINT32_MAX;

  UnitState& checked(uint32_t unit, const char* who);
  bool is_read(const UnitState& state) const { // by this operator
    return state.last_touch > decision_began_;
  }
  const Decision& decide(std::span<const uint32_t> units);
  size_t note_touches(std::span<const uint32_t> units, bool alone);
  void apply_rule(uint32_t unit);
  void withdraw_request(uint32_t unit);
  size_t look_ahead(size_t places);
  void make_room(size_t places);
  void carry_out();
  void stop_pass();
  const Decision& release_all(bool with_kept);

  size_t slots_;
  std::vector<UnitState> states_;   // by unit
  std::array<Kind, 2> kinds_;       // by PassKind
  Kind* kind_ = nullptr;            // of the pass that runs now
  std::vector<uint32_t> requested_; // by rules, untouched since; in order
  bool by_rule_ = false;            // a rule replaces the order, for this touch
  uint64_t clock_ = 1;              // counts touches of units
  uint64_t pass_began_ = 0;         // by clock_
  uint64_t decision_began_ = 0;     // by clock_
  uint32_t previous_ = kNone;       // touched last in this pass
  uint32_t last_ = kNone; // whole, and all that the last operator read
  Decision decision_;
  const Decision nothing_;
};

} // namespace fsdp::detail
