#pragma once

#include "train.h"

#include <chrono>
#include <string>

namespace row_encoder {

/// Shows how a run gets on: a bar on a terminal, else a line every 50 steps.
class Progress {
 public:
  Progress(std::string run, int64_t steps);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress(); // ends the line of the bar

  void show(const Step& step);

 private:
  void draw_bar(const Step& step);

  std::string run_;
  int64_t steps_;
  bool terminal_;
  bool line_open_ = false;
  std::chrono::steady_clock::time_point drawn_;
};

} // namespace row_encoder
