#include "random/campaign.h"

#include "random/run.h"
#include "random/shrink.h"

#include <ATen/Parallel.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iostream>

namespace fsdp::random_models {
namespace {

/// What runs now, for the signal handler.
std::array<char, 4096> current_line{};

std::string replay_line(const Spec& spec) {
  return "test_random_models --replay \"" + to_text(spec) + "\"";
}

void write_error(const char* text) {
  [[maybe_unused]] const auto written =
      ::write(STDERR_FILENO, text, std::strlen(text));
}

void on_crash(int signal) {
  write_error("\ncrashed while this ran:\n  ");
  write_error(current_line.data());
  write_error("\n");
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void prepare() {
  static const bool once = [] {
    at::set_num_threads(1); // the ranks are threads already
    for (const int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE}) {
      std::signal(signal, on_crash);
    }
    return true;
  }();
  static_cast<void>(once);
}

std::string run_with(const Spec& spec, std::chrono::milliseconds timeout) {
  prepare();
  const auto line = replay_line(spec);
  current_line.fill('\0');
  std::copy_n(
      line.begin(),
      std::min(line.size(), current_line.size() - 1),
      current_line.begin());
  RunSettings settings;
  settings.timeout = timeout;
  return failure_of(spec, settings);
}

std::string
report(uint64_t seed, const Spec& spec, const std::string& failure) {
  const auto timeout = std::chrono::seconds(5); // a hang shrinks, too
  std::string last = failure;
  const auto shrunk = shrink(spec, [&](const Spec& candidate) {
    auto text = run_with(candidate, timeout);
    const bool fails = !text.empty() && !text.starts_with(kUnsharded);
    if (fails) {
      last = std::move(text);
    }
    return fails;
  });
  return "\nseed " + std::to_string(seed) + ": " + failure + "\n  " +
      replay_line(spec) + "\nshrunk in " + std::to_string(shrunk.tries) +
      " tries: " + last + "\n  " + replay_line(shrunk.spec) + "\n";
}

} // namespace

std::string replay(const Spec& spec) {
  return run_with(spec, std::chrono::seconds(15));
}

int run(const Campaign& campaign) {
  int failed = 0;
  for (int i = 0; i < campaign.count; ++i) {
    const auto seed = campaign.first_seed + static_cast<uint64_t>(i);
    const auto spec = draw(seed);
    const auto failure = replay(spec);
    if (!failure.empty()) {
      std::cerr << report(seed, spec, failure) << std::flush;
      if (++failed >= campaign.max_failures) {
        break;
      }
    }
    if (campaign.progress > 0 && (i + 1) % campaign.progress == 0) {
      std::cout << "random models: " << i + 1 << " of " << campaign.count
                << ", " << failed << " failed" << std::endl;
    }
  }
  return failed;
}

int64_t from_environment(const char* name, int64_t usual) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? usual : std::atoll(value);
}

} // namespace fsdp::random_models
