#include "launch/node_list.h"

#include "launch/variables.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace fsdp::detail {

namespace {

constexpr size_t kMostNodes = 65536;

using Names = std::optional<std::vector<std::string>>;

/// Splits at commas outside of brackets.
Names split_entries(const std::string& list) {
  std::vector<std::string> entries(1);
  bool in_brackets = false;
  for (const char c : list) {
    if (c == (in_brackets ? '[' : ']')) {
      return std::nullopt;
    }
    in_brackets = c == '[' || (in_brackets && c != ']');
    if (c == ',' && !in_brackets) {
      entries.emplace_back();
    } else {
      entries.back() += c;
    }
  }
  const bool has_empty =
      std::any_of(entries.begin(), entries.end(), [](const std::string& entry) {
        return entry.empty();
      });
  return in_brackets || has_empty ? Names() : Names(std::move(entries));
}

/// "07" of width 3 is "007".
std::string padded(int64_t number, size_t width) {
  auto text = std::to_string(number);
  return text.size() < width ? std::string(width - text.size(), '0') + text
                             : text;
}

/// What stands between brackets: "03-05,9" -> 03 04 05 9.
Names expand_ranges(const std::string& ranges) {
  const auto parts = split_entries(ranges);
  if (!parts.has_value()) {
    return std::nullopt;
  }
  std::vector<std::string> numbers;
  for (const auto& part : *parts) {
    const auto dash = part.find('-');
    const auto first_text = part.substr(0, dash);
    const auto first = parse_number(first_text);
    const auto last =
        dash == std::string::npos ? first : parse_number(part.substr(dash + 1));
    if (!first || !last || *last < *first ||
        *last - *first >= static_cast<int64_t>(kMostNodes)) {
      return std::nullopt;
    }
    for (int64_t number = *first; number <= *last; ++number) {
      numbers.push_back(padded(number, first_text.size()));
    }
  }
  return numbers;
}

/// One entry: every way to replace its brackets, the last of them fastest.
Names expand_entry(const std::string& entry) {
  const auto open = entry.find('[');
  if (open == std::string::npos) {
    return Names({entry});
  }
  const auto close = entry.find(']', open);
  const auto numbers = expand_ranges(entry.substr(open + 1, close - open - 1));
  const auto rest_text = entry.substr(close + 1);
  const auto rests =
      rest_text.empty() ? Names({std::string()}) : expand_entry(rest_text);
  if (!numbers || !rests || numbers->size() * rests->size() > kMostNodes) {
    return std::nullopt;
  }
  std::vector<std::string> names;
  for (const auto& number : *numbers) {
    for (const auto& rest : *rests) {
      names.push_back(entry.substr(0, open) + number + rest);
    }
  }
  return names;
}

} // namespace

Names expand_node_list(const std::string& list) {
  const auto entries = split_entries(list);
  if (!entries.has_value()) {
    return std::nullopt;
  }
  std::vector<std::string> names;
  for (const auto& entry : *entries) {
    const auto expanded = expand_entry(entry);
    if (!expanded || names.size() + expanded->size() > kMostNodes) {
      return std::nullopt;
    }
    names.insert(names.end(), expanded->begin(), expanded->end());
  }
  return names;
}

std::optional<std::vector<int>> expand_task_list(const std::string& list) {
  const auto entries = split_entries(list);
  if (!entries.has_value()) {
    return std::nullopt;
  }
  std::vector<int> tasks;
  for (const auto& entry : *entries) {
    const auto open = entry.find("(x");
    const auto count = parse_number(entry.substr(0, open));
    auto nodes = std::optional<int64_t>(1);
    if (open != std::string::npos) {
      nodes = entry.back() == ')'
          ? parse_number(entry.substr(open + 2, entry.size() - open - 3))
          : std::nullopt;
    }
    if (!count || !nodes || *count < 1 || *count > INT32_MAX || *nodes < 1 ||
        tasks.size() + static_cast<size_t>(*nodes) > kMostNodes) {
      return std::nullopt;
    }
    tasks.insert(
        tasks.end(), static_cast<size_t>(*nodes), static_cast<int>(*count));
  }
  return tasks;
}

} // namespace fsdp::detail
