#include <fsdp/units.h>

#include "api/name_pattern.h"

#include <fnmatch.h>

#include <algorithm>

namespace fsdp {

bool detail::name_matches(const std::string& pattern, const std::string& name) {
  // fnmatch keeps `*` inside one part of a path; a dotted name is such a path.
  auto as_path = [](std::string text) {
    std::replace(text.begin(), text.end(), '.', '/');
    return text;
  };
  return fnmatch(
             as_path(pattern).c_str(), as_path(name).c_str(), FNM_PATHNAME) ==
      0;
}

namespace {

std::string quoted(const std::vector<std::string>& patterns) {
  std::string text;
  for (const auto& pattern : patterns) {
    text += (text.empty() ? "\"" : ", \"") + pattern + "\"";
  }
  return text;
}

} // namespace

UnitPolicy named(const std::string& pattern) {
  return named(pattern, UnitOptions());
}

UnitPolicy named(const std::string& pattern, const UnitOptions& options) {
  return UnitPolicy(
      {"named(\"" + pattern + "\")",
       [=](const UnitPolicy::Candidate& each) -> std::optional<UnitOptions> {
         return detail::name_matches(pattern, each.name)
             ? std::optional(options)
             : std::nullopt;
       }});
}

UnitPolicy together(const std::vector<std::string>& patterns) {
  return together(patterns, UnitOptions());
}

UnitPolicy together(
    const std::vector<std::string>& patterns,
    const UnitOptions& options) {
  UnitPolicy::Rule rule;
  rule.description = "together({" + quoted(patterns) + "})";
  rule.together = true;
  rule.patterns = patterns;
  rule.match =
      [=](const UnitPolicy::Candidate& each) -> std::optional<UnitOptions> {
    const bool any = std::any_of(
        patterns.begin(), patterns.end(), [&](const std::string& pattern) {
          return detail::name_matches(pattern, each.name);
        });
    return any ? std::optional(options) : std::nullopt;
  };
  return UnitPolicy(std::move(rule));
}

UnitPolicy at_least(int64_t numel) {
  return at_least(numel, UnitOptions());
}

UnitPolicy at_least(int64_t numel, const UnitOptions& options) {
  return UnitPolicy(
      {"at_least(" + std::to_string(numel) + ")",
       [=](const UnitPolicy::Candidate& each) -> std::optional<UnitOptions> {
         return each.free_numel >= numel ? std::optional(options)
                                         : std::nullopt;
       }});
}

UnitPolicy when(std::function<std::optional<UnitOptions>(
                    const std::string& name,
                    const torch::nn::Module& module)> choose) {
  return UnitPolicy(
      {"when(...)",
       [choose = std::move(choose)](const UnitPolicy::Candidate& each) {
         return choose(each.name, each.module);
       }});
}

UnitPolicy detail::each(
    std::string description,
    ModuleTest test,
    const UnitOptions* options) {
  const auto chosen = options != nullptr ? *options : UnitOptions();
  return UnitPolicy(
      {std::move(description),
       [=](const UnitPolicy::Candidate& each) -> std::optional<UnitOptions> {
         return test(each.module) ? std::optional(chosen) : std::nullopt;
       }});
}

} // namespace fsdp
