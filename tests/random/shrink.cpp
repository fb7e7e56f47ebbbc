#include "random/shrink.h"

#include "random/fields.h"

#include <algorithm>
#include <type_traits>

namespace fsdp::random_models {
namespace {

class Candidates {
 public:
  explicit Candidates(const Spec& spec) : spec_(spec), cost_(cost(spec)) {}

  template <class F>
  void add(F&& change) {
    Spec candidate = spec_;
    change(candidate);
    normalize(candidate);
    if (cost(candidate) < cost_ &&
        std::find(found_.begin(), found_.end(), candidate) == found_.end()) {
      found_.push_back(std::move(candidate));
    }
  }

  std::vector<Spec> take() { return std::move(found_); }

 private:
  const Spec& spec_;
  int64_t cost_;
  std::vector<Spec> found_;
};

void remove_layer(Spec& spec, size_t index) {
  spec.layers.erase(spec.layers.begin() + static_cast<std::ptrdiff_t>(index));
  for (auto& layer : spec.layers) {
    layer.from -= layer.from > static_cast<int>(index) ? 1 : 0;
  }
  spec.fail_layer -= spec.fail_layer > static_cast<int>(index) ? 1 : 0;
}

/// Values to try instead of `value`, the simplest first.
template <class T>
std::vector<T> simpler_values(const T& value, const T& usual) {
  if constexpr (std::is_same_v<T, std::vector<std::string>>) {
    std::vector<T> values = {usual};
    for (size_t i = 0; i < value.size(); ++i) {
      T fewer = value;
      fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
      if (!fewer.empty()) {
        values.push_back(fewer);
      }
      for (size_t letter = 0; letter < value[i].size(); ++letter) {
        T shorter = value;
        shorter[i].erase(letter, 1);
        if (!shorter[i].empty()) {
          values.push_back(shorter);
        }
        T reduced = value;
        reduced[i][letter] = 's';
        values.push_back(reduced);
      }
    }
    return values;
  } else if constexpr (std::is_same_v<T, int>) {
    return {usual, usual + (value - usual) / 2, value - 1};
  } else if constexpr (std::is_enum_v<T>) {
    std::vector<T> values;
    for (int i = 0; i < static_cast<int>(value); ++i) {
      values.push_back(static_cast<T>(i));
    }
    return values;
  } else {
    return {usual};
  }
}

/// Adds candidates that differ in one field of what `part_of(spec)` returns.
template <class PartOf, class Visit, class T>
void simplify_fields(
    Candidates& candidates,
    const T& part,
    PartOf part_of,
    Visit visit) {
  const T usual;
  visit(part, [&](const std::string& name, const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    Value usual_value{};
    visit(usual, [&](const std::string& other, const auto& each) {
      if constexpr (std::is_same_v<std::decay_t<decltype(each)>, Value>) {
        usual_value = name == other ? each : usual_value;
      }
    });
    for (const auto& simple : simpler_values(value, usual_value)) {
      candidates.add([&](Spec& spec) {
        visit(part_of(spec), [&](const std::string& other, auto& field) {
          if constexpr (std::is_same_v<std::decay_t<decltype(field)>, Value>) {
            field = name == other ? simple : field;
          }
        });
      });
    }
  });
}

} // namespace

std::vector<Spec> simpler(const Spec& spec) {
  Candidates candidates(spec);
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    candidates.add([i](Spec& each) { remove_layer(each, i); });
  }
  simplify_fields(
      candidates,
      spec,
      [](Spec& each) -> Spec& { return each; },
      [](auto& each, auto&& visit) { visit_fields(each, visit); });
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    for (const auto kind : simpler_values(spec.layers[i].kind, Kind())) {
      candidates.add([&](Spec& each) { each.layers[i].kind = kind; });
    }
    simplify_fields(
        candidates,
        spec.layers[i],
        [i](Spec& each) -> LayerSpec& { return each.layers[i]; },
        [](auto& each, auto&& visit) { visit_fields_of_layer(each, visit); });
  }
  return candidates.take();
}

Shrunk shrink(
    Spec spec,
    const std::function<bool(const Spec&)>& fails,
    int max_tries) {
  Shrunk shrunk{std::move(spec)};
  bool simplified = true;
  while (simplified) {
    simplified = false;
    for (auto& candidate : simpler(shrunk.spec)) {
      if (shrunk.tries++ >= max_tries) {
        return shrunk;
      }
      if (fails(candidate)) {
        shrunk.spec = std::move(candidate);
        simplified = true;
        break;
      }
    }
  }
  return shrunk;
}

} // namespace fsdp::random_models
