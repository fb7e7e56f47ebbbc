#include "faults/job.h"

#include "start/jobs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <sstream>
#include <system_error>
#include <thread>

namespace fsdp::testing {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Of loading libtorch on a busy machine.
constexpr std::chrono::seconds kStartLimit(60);

std::string fault_rank() {
  return fs::read_symlink("/proc/self/exe").parent_path() / "fault_rank";
}

std::string name_of(int rank) {
  return "rank-" + std::to_string(rank);
}

/// Inodes of the shared memory of libfsdp that a process maps.
std::set<std::string> memory_of(const std::string& process) {
  std::set<std::string> inodes;
  std::ifstream maps(process + "/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:fsdp") != std::string::npos) {
      std::istringstream words(line);
      std::string inode;
      for (int i = 0; i < 5; ++i) { // addresses, mode, offset, device, inode
        words >> inode;
      }
      inodes.insert(inode);
    }
  }
  return inodes;
}

std::set<std::string> sockets_of(const std::string& process) {
  const std::string lead = "socket:[";
  std::set<std::string> inodes;
  std::error_code error; // descriptors come and go meanwhile
  for (const auto& entry : fs::directory_iterator(process + "/fd", error)) {
    const auto target = fs::read_symlink(entry.path(), error).string();
    if (target.starts_with(lead)) {
      inodes.insert(
          target.substr(lead.size(), target.size() - lead.size() - 1));
    }
  }
  return inodes;
}

/// Unix domain sockets of this host, also those with abstract names.
std::set<std::string> unix_sockets() {
  std::set<std::string> inodes;
  std::ifstream table("/proc/net/unix");
  for (std::string line; std::getline(table, line);) {
    std::istringstream words(line);
    std::string inode;
    for (int i = 0; i < 7; ++i) {
      words >> inode;
    }
    inodes.insert(inode);
  }
  return inodes;
}

std::set<std::string> common(
    const std::set<std::string>& first,
    const std::set<std::string>& second) {
  std::set<std::string> both;
  for (const auto& each : first) {
    if (second.contains(each)) {
      both.insert(each);
    }
  }
  return both;
}

bool is_number(const std::string& text) {
  return text.find_first_not_of("0123456789") == std::string::npos;
}

std::string processes_with(const std::set<std::string>& memory) {
  std::string found;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const auto pid = entry.path().filename().string();
    if (is_number(pid) && !common(memory_of(entry.path()), memory).empty()) {
      found += pid + " ";
    }
  }
  return found;
}

/// Processes that run in the group of `leader`. Those that have ended do not
/// count: their parent may never ask.
bool is_running(const std::string& leader) {
  for (const auto& entry : fs::directory_iterator("/proc")) {
    if (!is_number(entry.path().filename())) {
      continue;
    }
    std::ifstream file(entry.path() / "stat");
    const std::string stat{std::istreambuf_iterator<char>(file), {}};
    const auto name_end = std::min(stat.rfind(')'), stat.size() - 1);
    std::istringstream words(stat.substr(name_end + 1));
    std::string state;
    std::string parent;
    std::string group;
    words >> state >> parent >> group;
    if (group == leader && state != "Z") {
      return true;
    }
  }
  return false;
}

/// Files that are none of the test's own.
std::string foreign_files(const Job& job) {
  std::string found;
  for (const auto& entry : fs::directory_iterator(job.folder())) {
    const auto name = entry.path().filename().string();
    if (!name.starts_with("rank-") && !name.starts_with("loaded-") &&
        name != "strike" && name != "end") {
      found += name + " ";
    }
  }
  for (const auto& entry : fs::directory_iterator("/dev/shm")) {
    const auto name = entry.path().filename().string();
    for (const pid_t pid : job.pids()) {
      if (name.find(std::to_string(pid)) != std::string::npos) {
        found += "/dev/shm/" + name + " ";
      }
    }
  }
  return found;
}

} // namespace

Job::Job(const JobOptions& options) {
  const Variables common = {
      {"LIBFSDP_BACKEND", options.backend},
      {"LIBFSDP_TIMEOUT",
       std::to_string(static_cast<double>(options.timeout.count()) / 1000)},
      {"LIBFSDP_JOB", folder()},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(free_port())},
      {"TMPDIR", folder()}};
  Words words = {fault_rank()};
  words.insert(words.end(), options.arguments.begin(), options.arguments.end());
  words.push_back("folder=" + folder());
  for (int rank = 0; rank < options.size; ++rank) {
    ranks_.push_back(std::make_unique<Process>(
        Command{
            words, by_hand(rank, options.size) + common + options.variables},
        folder() + "/" + name_of(rank)));
  }
}

std::vector<pid_t> Job::pids() const {
  std::vector<pid_t> pids;
  for (const auto& each : ranks_) {
    pids.push_back(each->pid());
  }
  return pids;
}

bool Job::await_line(int rank, const std::string& lead) {
  auto& process = this->rank(rank);
  const auto has_line = [&] {
    return ("\n" + process.out()).find("\n" + lead) != std::string::npos;
  };
  eventually([&] { return has_line() || process.has_ended(); }, kStartLimit);
  return has_line();
}

void Job::make_file(const std::string& name) const {
  std::ofstream(folder() + "/" + name).flush();
}

bool Job::await_end(int rank, milliseconds limit) {
  return eventually([&] { return this->rank(rank).has_ended(); }, limit);
}

void expect_job(
    const JobOptions& options,
    int status,
    const std::string& pattern) {
  constexpr std::chrono::minutes kLimit(4);
  Job job(options);
  for (int rank = 0; rank < job.size(); ++rank) {
    EXPECT_TRUE(job.await_end(rank, kLimit));
    const auto ended = job.rank(rank).result();
    EXPECT_TRUE(
        ended.status == status &&
        std::regex_search(ended.out, std::regex(pattern)))
        << options.backend << " rank " << rank << ": status " << ended.status
        << ", " << ended.out << ended.err.substr(0, 2000);
  }
}

std::string line_after(const std::string& out, const std::string& lead) {
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(lead)) {
      return line.substr(lead.size());
    }
  }
  return {};
}

bool eventually(const std::function<bool()>& is_so, milliseconds limit) {
  const auto end = Clock::now() + limit;
  while (!is_so()) {
    if (Clock::now() > end) {
      return false;
    }
    std::this_thread::sleep_for(milliseconds(2));
  }
  return true;
}

void Leavings::note(const Job& job) {
  const auto of_host = unix_sockets();
  for (const pid_t pid : job.pids()) {
    const auto process = "/proc/" + std::to_string(pid);
    memory_.merge(memory_of(process));
    sockets_.merge(common(sockets_of(process), of_host));
  }
}

void Leavings::expect_none(const Job& job) const {
  for (const pid_t pid : job.pids()) {
    EXPECT_TRUE(eventually(
        [&] { return !is_running(std::to_string(pid)); },
        std::chrono::seconds(5)))
        << "processes of group " << pid << " are left";
  }
  EXPECT_EQ(processes_with(memory_), "");
  EXPECT_TRUE(common(sockets_, unix_sockets()).empty());
  EXPECT_EQ(foreign_files(job), "");
}

} // namespace fsdp::testing
