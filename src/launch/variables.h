#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace fsdp::detail {

/// Looks an environment variable up.
using GetVariable =
    std::function<std::optional<std::string>(const std::string& name)>;

/// The environment of this process.
GetVariable process_environment();

/// Environment variables with types. An empty variable counts as not set.
/// Errors are std::invalid_argument and name the variable, its value and what
/// was expected.
class Variables {
 public:
  explicit Variables(GetVariable get);

  bool has(const std::string& name) const;
  std::optional<std::string> text(const std::string& name) const;

  /// A whole number in [low, high].
  std::optional<int64_t>
  number(const std::string& name, int64_t low, int64_t high) const;

  /// Throws: the variable `name` is not what was expected.
  [[noreturn]] void refuse(const std::string& name, const std::string& expected)
      const;

 private:
  GetVariable get_;
};

/// A whole number without sign, blanks or other characters around it; nothing
/// where `text` is no such number.
std::optional<int64_t> parse_number(const std::string& text);

} // namespace fsdp::detail
