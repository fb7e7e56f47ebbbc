#include "progress.h"

#include <unistd.h>

#include <iomanip>
#include <iostream>
#include <sstream>

namespace row_encoder {

namespace {

constexpr int64_t kWidth = 30;
constexpr int64_t kStepsPerLine = 50;
constexpr auto kRedraw = std::chrono::milliseconds(100);

std::string text_of(const Step& step, int64_t steps) {
  std::ostringstream text;
  text << std::setw(5) << step.number << "/" << steps << "  loss " << std::fixed
       << std::setprecision(5) << step.loss;
  return text.str();
}

} // namespace

Progress::Progress(std::string run, int64_t steps, std::ostream& log)
    : run_(std::move(run)),
      steps_(steps),
      log_(log),
      terminal_(isatty(STDOUT_FILENO) != 0) {
}

Progress::~Progress() {
  if (line_open_) {
    std::cout << std::endl;
  }
}

void Progress::add(const Step& step) {
  show(step);
  log_ << run_ << "," << step.number << "," << step.learning_rate << ","
       << step.loss << "\n";
}

void Progress::show(const Step& step) {
  if (terminal_) {
    draw_bar(step);
  } else if (step.number % kStepsPerLine == 0 || step.number == steps_) {
    std::cout << run_ << text_of(step, steps_) << std::endl;
  }
}

void Progress::draw_bar(const Step& step) {
  const auto now = std::chrono::steady_clock::now();
  if (now - drawn_ < kRedraw && step.number != steps_) {
    return;
  }
  drawn_ = now;
  const auto done = static_cast<size_t>(kWidth * step.number / steps_);
  std::cout << "\r" << run_ << " [" << std::string(done, '#')
            << std::string(kWidth - done, '.') << "]" << text_of(step, steps_)
            << std::flush;
  line_open_ = true;
}

} // namespace row_encoder
