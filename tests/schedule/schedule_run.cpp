#include "schedule_run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

namespace fsdp::detail {
namespace {

std::string letter(uint32_t unit) {
  return std::string(1, static_cast<char>('A' + unit));
}

} // namespace

Units units_of(const std::string& word) {
  Units units;
  for (const char each : word) {
    units.push_back(static_cast<uint32_t>(each - 'A'));
  }
  return units;
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) {
    words.push_back(word);
  }
  return words;
}

std::string text_of(const Decision& decision) {
  std::string text;
  const auto add = [&](const char* sign, const Units& units) {
    for (const auto unit : units) {
      text += (text.empty() ? "" : " ") + (sign + letter(unit));
    }
  };
  add("-", decision.release);
  add("+", decision.gather);
  add(">", decision.prefetch);
  return text.empty() ? "." : text;
}

ScheduleRun::ScheduleRun(size_t units, int64_t slots)
    : schedule_(units, slots),
      slots_(static_cast<size_t>(slots)),
      pins_(units, 0) {
}

void ScheduleRun::begin(PassKind kind) {
  schedule_.begin_pass(kind);
  in_pass_ = true;
}

std::string ScheduleRun::run(const std::string& operators) {
  std::string text;
  for (const auto& word : words_of(operators)) {
    const auto units = units_of(word);
    text += (text.empty() ? "" : " | ") + open(units);
    close(units);
  }
  return text;
}

std::string ScheduleRun::open(const Units& units) {
  last_ = schedule_.touch(units);
  const std::set<uint32_t> read(units.begin(), units.end());
  check_release(read);
  check_gathers(read);
  for (const auto unit : read) {
    EXPECT_TRUE(whole_.count(unit)) << letter(unit) << " is read";
  }
  if (!last_.empty()) {
    check_size(read);
  }
  for (const auto unit : units) {
    ++pins_[unit];
  }
  for (uint32_t unit = 0; unit < pins_.size(); ++unit) {
    EXPECT_EQ(schedule_.is_whole(unit), whole_.count(unit) == 1);
  }
  return text_of(last_);
}

void ScheduleRun::close(const Units& units) {
  schedule_.unpin(units);
  for (const auto unit : units) {
    --pins_[unit];
  }
}

bool ScheduleRun::is_loose(uint32_t unit) const {
  return whole_.count(unit) != 0 && kept_.count(unit) == 0 && pins_[unit] == 0;
}

void ScheduleRun::check_release(const std::set<uint32_t>& read) {
  EXPECT_TRUE(
      last_.release.empty() || !last_.gather.empty() || !last_.prefetch.empty())
      << "room is made for nothing";
  for (const auto unit : last_.release) {
    EXPECT_TRUE(is_loose(unit)) << letter(unit) << " is released";
    EXPECT_FALSE(read.count(unit)) << letter(unit) << " is released";
    whole_.erase(unit);
  }
}

void ScheduleRun::check_gathers(const std::set<uint32_t>& read) {
  for (const auto unit : last_.gather) {
    EXPECT_TRUE(read.count(unit)) << letter(unit) << " is gathered";
    EXPECT_TRUE(whole_.insert(unit).second) << letter(unit) << " is gathered";
    ++gathers_at_touch_;
  }
  for (const auto unit : last_.prefetch) {
    EXPECT_FALSE(read.count(unit)) << letter(unit) << " is gathered ahead";
    EXPECT_TRUE(whole_.insert(unit).second) << letter(unit) << " comes ahead";
  }
  EXPECT_TRUE(in_pass_ || last_.prefetch.empty());
}

void ScheduleRun::check_size(const std::set<uint32_t>& read) {
  size_t count = read.size();
  for (const auto unit : whole_) {
    count += is_loose(unit) && read.count(unit) == 0 ? 1 : 0;
  }
  for (const auto unit : last_.prefetch) {
    count += kept_.count(unit); // they take no slot, but none goes with it
  }
  const auto most = std::max(slots_, read.size());
  EXPECT_LE(count, most) << whole() << " after " << text_of(last_);
  if (!last_.release.empty()) {
    EXPECT_EQ(count, most) << "too much was released: " << text_of(last_);
  }
}

std::string ScheduleRun::release_all(const Decision& decision) {
  last_ = decision;
  EXPECT_TRUE(last_.gather.empty() && last_.prefetch.empty());
  for (const auto unit : last_.release) {
    EXPECT_EQ(pins_[unit], 0);
    EXPECT_EQ(whole_.erase(unit), 1U);
  }
  in_pass_ = false;
  return text_of(last_);
}

std::string ScheduleRun::end() {
  auto text = release_all(schedule_.end_pass());
  for (const auto unit : whole_) {
    EXPECT_TRUE(kept_.count(unit)) << letter(unit) << " was left whole";
  }
  return text;
}

std::string ScheduleRun::fail() {
  auto text = release_all(schedule_.fail_pass());
  for (const auto unit : whole_) {
    EXPECT_GT(pins_[unit], 0) << letter(unit) << " was left whole";
  }
  return text;
}

std::string ScheduleRun::forward(const std::string& operators) {
  begin(PassKind::kForward);
  auto text = run(operators);
  end();
  return text;
}

std::string ScheduleRun::backward(const std::string& operators) {
  begin(PassKind::kBackward);
  auto text = run(operators);
  end();
  return text;
}

void ScheduleRun::keep(uint32_t unit, bool kept) {
  schedule_.keep(unit, kept);
  if (kept) {
    kept_.insert(unit);
  } else {
    kept_.erase(unit);
  }
}

void ScheduleRun::set_whole(uint32_t unit, bool whole) {
  schedule_.set_whole(unit, whole);
  if (whole) {
    whole_.insert(unit);
  } else {
    whole_.erase(unit);
  }
}

std::string ScheduleRun::whole() const {
  std::string text;
  for (const auto unit : whole_) {
    text += letter(unit);
  }
  return text;
}

} // namespace fsdp::detail
