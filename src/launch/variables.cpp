#include "launch/variables.h"

#include <charconv>
#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace fsdp::detail {

GetVariable process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* const value = std::getenv(name.c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  };
}

std::optional<int64_t> parse_number(const std::string& text) {
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end || text.front() == '-') {
    return std::nullopt;
  }
  return number;
}

Variables::Variables(GetVariable get) : get_(std::move(get)) {
}

bool Variables::has(const std::string& name) const {
  return text(name).has_value();
}

std::optional<std::string> Variables::text(const std::string& name) const {
  auto value = get_(name);
  return value.has_value() && value->empty() ? std::nullopt : value;
}

std::optional<int64_t>
Variables::number(const std::string& name, int64_t low, int64_t high) const {
  const auto value = text(name);
  if (!value.has_value()) {
    return std::nullopt;
  }
  const auto parsed = parse_number(*value);
  if (!parsed.has_value() || *parsed < low || *parsed > high) {
    refuse(
        name,
        "a whole number from " + std::to_string(low) + " to " +
            std::to_string(high));
  }
  return parsed;
}

void Variables::refuse(const std::string& name, const std::string& expected)
    const {
  const auto value = text(name);
  throw std::invalid_argument(
      "fsdp: environment variable " + name + " is " +
      (value.has_value() ? "\"" + *value + "\"" : "not set") +
      ", but must be " + expected + ".");
}

} // namespace fsdp::detail
