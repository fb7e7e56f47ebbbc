#include "launch/failure_report.h"

#include <iomanip>
#include <sstream>

namespace fsdp::detail {
namespace {

constexpr const char* kWho = "fsdp run: ";

std::string name_of(const FailedRank& failed) {
  return "rank " + std::to_string(failed.rank) + " (pid " +
      std::to_string(failed.pid) + ")";
}

std::string end_of(const FailedRank& failed) {
  std::ostringstream text;
  const double seconds = std::chrono::duration<double>(failed.after).count();
  text << failed.status.describe() << " after " << std::fixed
       << std::setprecision(1) << seconds << " s";
  return text.str();
}

} // namespace

std::string failure_report(
    const std::vector<FailedRank>& failed,
    const LastLines& last_lines,
    const std::string& request,
    const std::string& log) {
  std::ostringstream text;
  const FailedRank& first = failed.front();
  if (!request.empty()) {
    text << kWho << "ended by " << request << ".\n"
         << kWho << name_of(first) << ": " << end_of(first) << "\n";
  } else {
    text << kWho << name_of(first) << " failed first: " << end_of(first) << ".";
    if (!log.empty()) {
      text << " Its log is " << log << ".";
    }
    text << (last_lines.lines().empty() ? "\n" : " Its last lines:\n");
    for (const std::string& line : last_lines.lines()) {
      text << "  " << line << "\n";
    }
  }
  for (size_t i = 1; i < failed.size(); ++i) {
    text << kWho << name_of(failed[i]) << ": " << end_of(failed[i]) << "\n";
  }
  return text.str();
}

} // namespace fsdp::detail
