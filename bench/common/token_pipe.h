#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <functional>
#include <string>

namespace bench {

/// What the conductor asks for: "run MEASURE COUNT".
struct Token {
  std::string measure;
  int64_t count = 0;
};

/// Answers the conductor of the benchmark (bench/run.py) until stdin ends: says
/// that this rank is ready, then sleeps in a blocking read until a token comes,
/// hands it to `answer` and prints the result as one line. Nothing else may be
/// written to stdout. Throws std::runtime_error for a line that is no token.
void serve(const std::function<nlohmann::json(const Token&)>& answer);

/// The seconds that each of `count` calls of `work` took; `prepare` runs before
/// each and is not timed. The form of an answer.
nlohmann::json seconds_of(
    int64_t count,
    const std::function<void()>& prepare,
    const std::function<void()>& work);

/// Runs `program` and returns the exit status of the process: what it throws is
/// written to stderr, with `name` before it.
int run_program(const char* name, const std::function<void()>& program);

} // namespace bench
