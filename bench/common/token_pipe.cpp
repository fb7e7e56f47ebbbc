#include "common/token_pipe.h"

#include <chrono>
#include <exception>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <vector>

namespace bench {

namespace {

Token parse_token(const std::string& line) {
  std::istringstream words(line);
  std::string verb;
  Token token;
  words >> verb >> token.measure >> token.count;
  if (!words || verb != "run" || token.count < 1) {
    throw std::runtime_error(
        "expected 'run MEASURE COUNT' on stdin, but got '" + line + "'.");
  }
  return token;
}

} // namespace

void serve(const std::function<nlohmann::json(const Token&)>& answer) {
  std::cout << R"({"ready": true})" << std::endl;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::cout << answer(parse_token(line)) << std::endl;
  }
}

nlohmann::json seconds_of(
    int64_t count,
    const std::function<void()>& prepare,
    const std::function<void()>& work) {
  std::vector<double> seconds;
  for (int64_t i = 0; i < count; ++i) {
    prepare();
    const auto begin = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> took =
        std::chrono::steady_clock::now() - begin;
    seconds.push_back(took.count());
  }
  return {{"seconds", seconds}};
}

int run_program(const char* name, const std::function<void()>& program) {
  try {
    program();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << name << ": " << error.what() << std::endl;
  }
  return 1;
}

} // namespace bench
