#include "suggestion.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace fsdp::tool {
namespace {

// The number of letters to insert, remove or change.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, diagonal + 1, row[j] + 1});
    }
  }
  return row.back();
}

} // namespace

std::string did_you_mean(
    std::string_view word,
    const std::vector<std::string>& known) {
  size_t nearest = std::max<size_t>(word.size() / 3, 2) + 1;
  std::string result;
  for (const std::string& candidate : known) {
    const size_t changes = distance(word, candidate);
    if (changes < nearest) {
      nearest = changes;
      result = " Did you mean '" + candidate + "'?";
    }
  }
  return result;
}

} // namespace fsdp::tool
