#include "schedule/whole_memory.h"

#include "schedule/schedule.h"

#include <algorithm>
#include <vector>

namespace fsdp::detail {
namespace {

/// Adds up what the decisions of a schedule make whole.
class MemoryCount {
 public:
  explicit MemoryCount(std::span<const UnitMemory> units) : units_(units) {}

  void apply(const Decision& decision) {
    bytes_ -= sum(decision.release);
    bytes_ += sum(decision.gather) + sum(decision.prefetch);
    peak_bytes_ = std::max(peak_bytes_, bytes_);
  }

  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  int64_t sum(const std::vector<uint32_t>& units) const {
    int64_t bytes = 0;
    for (const auto unit : units) {
      bytes += units_[unit].bytes;
    }
    return bytes;
  }

  std::span<const UnitMemory> units_;
  int64_t bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

} // namespace

int64_t peak_whole_bytes(
    std::span<const UnitTouch> pass,
    std::span<const UnitMemory> units,
    int64_t slots) {
  Schedule schedule(units.size(), slots);
  for (uint32_t unit = 0; unit < units.size(); ++unit) {
    schedule.keep(unit, units[unit].kept);
  }
  MemoryCount memory(units);
  std::vector<uint32_t> read;
  for (int round = 0; round < 2; ++round) {
    schedule.begin_pass(PassKind::kForward);
    for (size_t i = 0; i < pass.size();) {
      read.clear();
      do {
        read.push_back(pass[i++].unit);
      } while (i < pass.size() && pass[i].joined);
      memory.apply(schedule.touch(read));
      schedule.unpin(read);
    }
    memory.apply(schedule.end_pass());
  }
  return memory.peak_bytes();
}

} // namespace fsdp::detail
