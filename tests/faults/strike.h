#pragma once

#include "faults/job.h"

#include <chrono>
#include <csignal>
#include <functional>
#include <string>

namespace fsdp::testing {

/// A signal that one rank of a training gets.
struct Strike {
  std::string backend;
  int size = 2;
  int victim = 1;
  int signal = SIGKILL;
  std::chrono::milliseconds timeout = std::chrono::seconds(20);

  /// Where the victim strikes itself; or else `moment` says when.
  std::string place = {};
  /// Waits for the moment.
  std::function<void(Job&)> moment = {};

  /// The others may have to wait for the whole time limit, since they do not
  /// know yet that the rank is there.
  bool may_be_missing = false;

  /// Where the error of the others comes from, and parts of its text.
  std::string where = {};
  Words parts = {};
};

/// How long after it a death may be seen. A second would do on a machine that
/// does nothing else.
constexpr std::chrono::milliseconds kDeathIsSeen(4000);

/// Strikes a job of its own and expects what is promised: the others throw, in
/// time, an error that names the rank and what waited for it, the next call of
/// the net says why it can not be used, and nothing is left. Returns after how
/// long the last of them has thrown.
std::chrono::milliseconds expect_seen(const Strike& strike);

} // namespace fsdp::testing
