#pragma once

#include "train.h"

#include <chrono>
#include <iosfwd>
#include <string>

namespace row_encoder {

/// Shows how a run gets on, as a bar on a terminal, else by a line every 50
/// steps, and writes each step to a log.
class Progress {
 public:
  Progress(std::string run, int64_t steps, std::ostream& log);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress(); // ends the line of the bar

  void add(const Step& step);

 private:
  void show(const Step& step);
  void draw_bar(const Step& step);

  std::string run_;
  int64_t steps_;
  std::ostream& log_;
  bool terminal_;
  bool line_open_ = false;
  std::chrono::steady_clock::time_point drawn_;
};

} // namespace row_encoder
