#include "faults/rank_tools.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <thread>

namespace fsdp::testing {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

std::map<std::string, std::string>& arguments() {
  static std::map<std::string, std::string> all;
  return all;
}

} // namespace

void set_arguments(int count, char** words) {
  for (int i = 0; i < count; ++i) {
    const std::string word = words[i];
    const auto equals = word.find('=');
    arguments()[word.substr(0, equals)] = word.substr(equals + 1);
  }
}

const std::string& argument(const std::string& key) {
  const auto found = arguments().find(key);
  if (found == arguments().end()) {
    throw std::invalid_argument("no argument " + key + "=");
  }
  return found->second;
}

std::string argument_or(const std::string& key, const std::string& otherwise) {
  return arguments().contains(key) ? argument(key) : otherwise;
}

int number(const std::string& key) {
  return std::stoi(argument(key));
}

int own_rank() {
  return std::stoi(std::getenv("RANK"));
}

int all_ranks() {
  return std::stoi(std::getenv("WORLD_SIZE"));
}

void say(const std::string& line) {
  std::cout << line + "\n" << std::flush;
}

std::string now_ms() {
  const auto now = Clock::now().time_since_epoch();
  return std::to_string(std::chrono::duration_cast<milliseconds>(now).count());
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

void await_file(const std::string& name) {
  const auto limit = Clock::now() + std::chrono::minutes(2);
  while (!fs::exists(argument("folder") + "/" + name)) {
    if (Clock::now() > limit) {
      throw std::runtime_error("nobody made the file " + name);
    }
    std::this_thread::sleep_for(milliseconds(2));
  }
}

void meet() {
  const std::string name = "loaded-";
  std::ofstream(argument("folder") + "/" + name + std::to_string(own_rank()));
  for (int rank = 0; rank < all_ranks(); ++rank) {
    await_file(name + std::to_string(rank));
  }
  say("starts");
}

std::optional<std::string> failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::DistBackendError& error) {
    return error.what_without_backtrace();
  }
  return std::nullopt;
}

int status_of(
    const std::optional<std::string>& failure,
    const std::string& where) {
  if (!failure) {
    return 0;
  }
  say("failed " + now_ms() + " " + where + ": " + one_line(*failure));
  return kFailed;
}

int open_descriptors() {
  const auto all = fs::directory_iterator("/proc/self/fd");
  return static_cast<int>(std::distance(begin(all), end(all)));
}

int views_of_shared_memory() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("/memfd:fsdp") != std::string::npos ? 1 : 0;
  }
  return count;
}

} // namespace fsdp::testing
