#include "table.h"

#include <array>
#include <charconv>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace row_encoder {

namespace {

constexpr float kWhite = 16.0F;
constexpr int64_t kClasses = 10;

/// A line of the file, for errors as well.
class Line {
 public:
  Line(const std::string& path, size_t number, std::string_view text)
      : where_(path + ":" + std::to_string(number)) {
    if (text.ends_with('\r')) {
      text.remove_suffix(1);
    }
    for (size_t comma = text.find(','); comma != std::string_view::npos;
         comma = text.find(',')) {
      fields_.push_back(text.substr(0, comma));
      text.remove_prefix(comma + 1);
    }
    fields_.push_back(text);
  }

  size_t size() const { return fields_.size(); }

  float pixel(size_t index) const {
    const auto value = number<float>(index);
    if (!value.has_value() || !(*value >= 0.0F && *value <= kWhite)) {
      fail_at(index, "a number from 0 to 16");
    }
    return *value / kWhite;
  }

  int64_t label() const {
    const auto value = number<int64_t>(size() - 1);
    if (!value.has_value() || *value < 0 || *value >= kClasses) {
      fail_at(size() - 1, "a label from 0 to 9");
    }
    return *value;
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error(where_ + ": " + what);
  }

 private:
  template <class T>
  std::optional<T> number(size_t index) const {
    const auto text = fields_[index];
    const auto* end = text.data() + text.size();
    T value{};
    const auto parsed = std::from_chars(text.data(), end, value);
    if (parsed.ec != std::errc() || parsed.ptr != end) {
      return std::nullopt;
    }
    return value;
  }

  [[noreturn]] void fail_at(size_t index, const std::string& wanted) const {
    fail(
        "field " + std::to_string(index + 1) + " is '" +
        std::string(fields_[index]) + "', expected " + wanted + ".");
  }

  std::string where_;
  std::vector<std::string_view> fields_;
};

void check_size(const Line& line, size_t columns) {
  if (line.size() < 2) {
    line.fail("expected pixels and a label, separated by commas.");
  }
  if (columns != 0 && line.size() != columns + 1) {
    line.fail(
        std::to_string(line.size()) + " fields, but line 1 has " +
        std::to_string(columns + 1) + ".");
  }
}

} // namespace

Examples Examples::select(const at::Tensor& rows) const {
  return {x.index_select(0, rows), y.index_select(0, rows)};
}

Examples read_table(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    throw std::runtime_error(path + ": cannot be opened.");
  }
  std::vector<float> pixels;
  std::vector<int64_t> labels;
  size_t columns = 0;
  for (std::string text; std::getline(file, text);) {
    const Line line(path, labels.size() + 1, text);
    check_size(line, columns);
    columns = line.size() - 1;
    for (size_t i = 0; i < columns; ++i) {
      pixels.push_back(line.pixel(i));
    }
    labels.push_back(line.label());
  }
  if (file.bad() || labels.empty()) {
    throw std::runtime_error(path + ": has no rows, or cannot be read.");
  }
  const auto rows = static_cast<int64_t>(labels.size());
  return {
      torch::tensor(pixels).view({rows, static_cast<int64_t>(columns)}),
      torch::tensor(labels, torch::kInt64)};
}

Dataset split(const Examples& all) {
  constexpr int64_t kPart = 5;
  std::array<int64_t, kClasses> seen{};
  std::vector<int64_t> train;
  std::vector<int64_t> held_out;
  for (int64_t row = 0; row < all.rows(); ++row) {
    auto& count = seen[all.y[row].item<int64_t>()];
    (++count % kPart == 0 ? held_out : train).push_back(row);
  }
  return {
      all.select(torch::tensor(train, torch::kInt64)),
      all.select(torch::tensor(held_out, torch::kInt64))};
}

double nearest_centroid_accuracy(const Dataset& data, int64_t classes) {
  const auto& [x, y] = data.train;
  const auto counts = torch::bincount(y, {}, classes).clamp_min(1);
  const auto centroids =
      torch::zeros({classes, x.size(1)}).index_add_(0, y, x) /
      counts.unsqueeze(1);
  const auto nearest = torch::cdist(data.held_out.x, centroids).argmin(1);
  return nearest.eq(data.held_out.y).to(torch::kDouble).mean().item<double>();
}

} // namespace row_encoder
