#pragma once

#include "schedule/schedule.h"

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace fsdp::detail {

using Units = std::vector<uint32_t>;

/// A schedule, and a plain model of what is whole that checks each decision.
///
/// Units are letters, an operator is a word: "A BC" are an operator that reads
/// unit 0 and one that reads units 1 and 2. Decisions are texts: "-A +B >C"
/// releases A, gathers B, and gathers C ahead; "." is an empty one.
class ScheduleRun {
 public:
  ScheduleRun(size_t units, int64_t slots);

  Schedule& schedule() { return schedule_; }

  void begin(PassKind kind);
  /// Runs the operators; the decisions are joined by " | ".
  std::string run(const std::string& operators);
  std::string end();
  std::string fail();
  /// begin(), run() and end().
  std::string forward(const std::string& operators);
  std::string backward(const std::string& operators);

  /// An operator that goes on until close().
  std::string open(const Units& units);
  void close(const Units& units);

  void keep(uint32_t unit, bool kept);
  void set_whole(uint32_t unit, bool whole);

  /// All units that are whole, as letters.
  std::string whole() const;
  size_t whole_size() const { return whole_.size(); }
  /// Gathers that operators had to wait for from their beginning.
  int gathers_at_touch() const { return gathers_at_touch_; }
  const Decision& last() const { return last_; }

 private:
  void check_release(const std::set<uint32_t>& read);
  void check_gathers(const std::set<uint32_t>& read);
  void check_size(const std::set<uint32_t>& read);
  bool is_loose(uint32_t unit) const;
  std::string release_all(const Decision& decision);

  Schedule schedule_;
  size_t slots_;
  bool in_pass_ = false;
  std::set<uint32_t> whole_;
  std::set<uint32_t> kept_;
  std::vector<int> pins_;
  int gathers_at_touch_ = 0;
  Decision last_;
};

std::string text_of(const Decision& decision);

/// The units of a word.
Units units_of(const std::string& word);

/// The words of a text.
std::vector<std::string> words_of(const std::string& text);

} // namespace fsdp::detail
