#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fsdp::detail {

/// An operator reads unit `unit`.
struct UnitTouch {
  uint32_t unit = 0;
  /// By the same operator as the touch before it.
  bool joined = false;

  bool operator==(const UnitTouch&) const = default;
};

/// The order of touches of the last few different passes of one kind (forward
/// or backward), and which of them the pass that runs now follows.
/// See [Note: Schedule].
class RecordedPasses {
 public:
  /// How many different passes are remembered; the least recently run is
  /// forgotten first. A program calls few nets in more different ways in turn.
  static constexpr size_t kRemembered = 8;
  /// Of a longer pass the beginning is recorded.
  static constexpr size_t kLongest = size_t{1} << 16;

  explicit RecordedPasses(size_t units) : units_(units) {}

  /// A pass begins.
  void begin();

  /// The next touch of this pass. `touch.unit` is less than `units`.
  void touch(UnitTouch touch);

  /// Records the pass, unless it touched nothing. begin() comes next.
  void end();

  /// Forgets all passes.
  void clear();

  /// Where nothing is recorded: lets the next pass expect the reverse of
  /// `pass`, of another kind. Forgotten when the next pass is a different one.
  void guess_reverse_of(std::span<const UnitTouch> pass);

  bool empty() const { return passes_.empty(); }

  /// The pass that was recorded last; empty when there is none. Not a guess.
  std::span<const UnitTouch> latest() const;

  /// The last touch was the expected one.
  bool in_step() const { return in_step_; }

  /// The touches that are expected next, empty unless in step.
  std::span<const UnitTouch> ahead() const;

 private:
  struct Pass {
    std::vector<UnitTouch> touches;
    std::vector<uint32_t> ends; // by unit: behind its last touch; 0: untouched
    bool agrees = true;         // with this pass from its beginning
    bool guessed = false;
  };

  void seek(uint32_t unit);
  size_t find_recorded() const;
  size_t place_for_new();
  void record(Pass& pass);

  size_t units_;
  std::vector<Pass> passes_; // the most recently run first
  std::vector<UnitTouch> current_;
  size_t followed_ = 0; // in passes_
  size_t position_ = 0; // in its touches: what is expected next
  bool in_step_ = false;
};

} // namespace fsdp::detail
