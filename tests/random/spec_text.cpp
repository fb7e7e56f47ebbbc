#include "random/fields.h"
#include "random/spec.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <type_traits>

namespace fsdp::random_models {
namespace {

[[noreturn]] void refuse(std::string_view what, std::string_view text) {
  throw std::invalid_argument(
      "random model: " + std::string(what) + " '" + std::string(text) + "'");
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    parts.push_back(part);
  }
  return parts;
}

template <class T>
std::string value_text(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return std::string(Names<T>::kAll[static_cast<size_t>(value)]);
  } else if constexpr (std::is_arithmetic_v<T>) {
    std::ostringstream out;
    out << value;
    return out.str();
  } else { // micro-batches
    std::string text;
    for (const auto& each : value) {
      text += (text.empty() ? "" : ",") + each;
    }
    return text;
  }
}

std::vector<std::string> micro_from(const std::string& text) {
  auto micro = split(text, ',');
  for (const auto& each : micro) {
    if (each.empty() || each.find_first_not_of("sn") != std::string::npos) {
      refuse("expected letters s and n, but got", text);
    }
  }
  if (micro.empty()) {
    refuse("no micro-batches in", text);
  }
  return micro;
}

template <class T>
T value_from(const std::string& text) {
  if constexpr (std::is_enum_v<T>) {
    const auto& names = Names<T>::kAll;
    const auto found = std::find(names.begin(), names.end(), text);
    if (found == names.end()) {
      refuse("unknown name", text);
    }
    return static_cast<T>(found - names.begin());
  } else if constexpr (std::is_arithmetic_v<T>) {
    std::istringstream stream(text);
    T value{};
    if (!(stream >> value) || stream.peek() != std::char_traits<char>::eof()) {
      refuse("not a number:", text);
    }
    return value;
  } else {
    return micro_from(text);
  }
}

/// Visits two objects at once: the fields of one that differ from the other's.
class Writer {
 public:
  explicit Writer(std::string separator) : separator_(std::move(separator)) {}

  template <class T>
  void field(const char* name, const T& value, const T& usual) {
    if (value != usual) {
      text_ += separator_ + name + "=" + value_text(value);
    }
  }
  std::string& text() { return text_; }

 private:
  std::string separator_;
  std::string text_;
};

/// Calls visit_pair(name, field of a, field of b).
template <class T, class Visit, class Pair>
void visit_both(const T& a, const T& b, Visit visit, Pair pair) {
  visit(a, [&](const char* name, const auto& value) {
    visit(b, [&](const std::string& other, const auto& usual) {
      if constexpr (std::is_same_v<decltype(value), decltype(usual)>) {
        if (name == other) {
          pair(name, value, usual);
        }
      }
    });
  });
}

const auto kOfLayer = [](auto& layer, auto&& visit) {
  visit_fields_of_layer(layer, visit);
};
const auto kOfSpec = [](auto& spec, auto&& visit) {
  visit_fields(spec, visit);
};

template <class T, class Visit>
std::string fields_text(const T& object, Visit visit, const char* separator) {
  Writer writer(separator);
  visit_both(
      object, T(), visit, [&](const char* name, auto& value, auto& usual) {
        writer.field(name, value, usual);
      });
  return writer.text();
}

template <class T, class Visit>
void set_field(T& object, Visit visit, const std::string& assignment) {
  const auto equals = assignment.find('=');
  const auto key = assignment.substr(0, equals);
  bool known = false;
  visit(object, [&](const std::string& name, auto& field) {
    if (name == key && equals != std::string::npos) {
      field = value_from<std::decay_t<decltype(field)>>(
          assignment.substr(equals + 1));
      known = true;
    }
  });
  if (!known) {
    refuse("unknown field", assignment);
  }
}

LayerSpec parse_layer(const std::string& text) {
  const auto parts = split(text, ':');
  LayerSpec layer;
  layer.kind = value_from<Kind>(parts.empty() ? text : parts.front());
  for (size_t i = 1; i < parts.size(); ++i) {
    set_field(layer, kOfLayer, parts[i]);
  }
  return layer;
}

} // namespace

std::string to_text(const Spec& spec) {
  auto text = fields_text(spec, kOfSpec, " ");
  for (const auto& layer : spec.layers) {
    text += " " + value_text(layer.kind) + fields_text(layer, kOfLayer, ":");
  }
  return text.empty() ? text : text.substr(1);
}

Spec parse(const std::string& text) {
  Spec spec;
  std::istringstream stream(text);
  for (std::string word; stream >> word;) {
    const auto end_of_name = word.find_first_of("=:");
    if (end_of_name != std::string::npos && word[end_of_name] == '=') {
      set_field(spec, kOfSpec, word);
    } else {
      spec.layers.push_back(parse_layer(word));
    }
  }
  return spec;
}

} // namespace fsdp::random_models
