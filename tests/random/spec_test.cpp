#include "random/spec.h"

#include "random/fields.h"

#include <gtest/gtest.h>

#include <set>
#include <stdexcept>

namespace fsdp::random_models {
namespace {

constexpr uint64_t kSpecs = 2'000;

TEST(RandomSpec, TextReadsBackAsTheSameSpec) {
  for (uint64_t seed = 0; seed < kSpecs; ++seed) {
    const auto spec = draw(seed);
    const auto text = to_text(spec);
    ASSERT_EQ(text.find('\n'), std::string::npos);
    ASSERT_EQ(parse(text), spec) << text;
  }
}

TEST(RandomSpec, TextOmitsDefaultsAndNamesTheRest) {
  Spec spec;
  EXPECT_EQ(to_text(spec), "");
  spec.world = 3;
  spec.micro = {"ns", "s"};
  spec.clip = 0.3;
  spec.units = Units::kMixed;
  LayerSpec layer;
  layer.kind = Kind::kLstm;
  layer.out = 7;
  layer.frozen = true;
  spec.layers = {layer, LayerSpec()};
  EXPECT_EQ(
      to_text(spec),
      "world=3 units=mixed micro=ns,s clip=0.3 lstm:out=7:frozen=1 scale");
}

TEST(RandomSpec, WrongTextIsRefusedByName) {
  const auto error_of = [](const std::string& text) -> std::string {
    try {
      parse(text);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "none";
  };
  EXPECT_NE(error_of("wrold=3").find("'wrold=3'"), std::string::npos);
  EXPECT_NE(error_of("lsmt:in=3").find("'lsmt'"), std::string::npos);
  EXPECT_NE(error_of("lstm:in=3x").find("'3x'"), std::string::npos);
  EXPECT_NE(error_of("lstm:in").find("'in'"), std::string::npos);
  EXPECT_NE(error_of("micro=sx").find("'sx'"), std::string::npos);
  EXPECT_EQ(error_of("world=3 lstm:in=3"), "none");
}

TEST(RandomSpec, DrawnSpecsAreNormalAndTheSameForOneSeed) {
  for (uint64_t seed = 0; seed < kSpecs; ++seed) {
    const auto spec = draw(seed);
    auto normal = spec;
    normalize(normal);
    ASSERT_EQ(normal, spec) << to_text(spec);
    ASSERT_EQ(draw(seed), spec);
  }
}

TEST(RandomSpec, EveryKindAndOptionIsDrawn) {
  std::set<std::string> seen;
  for (uint64_t seed = 0; seed < kSpecs; ++seed) {
    const auto spec = draw(seed);
    const auto note = [&](const std::string& name, const auto& value) {
      using T = std::decay_t<decltype(value)>;
      if constexpr (std::is_enum_v<T>) {
        const auto& names = Names<T>::kAll;
        seen.insert(name + " " + std::string(names[size_t(value)]));
      } else if (value != T()) {
        seen.insert(name);
      }
    };
    visit_fields(spec, note);
    for (const auto& layer : spec.layers) {
      note("kind", layer.kind);
      visit_fields_of_layer(layer, note);
    }
  }
  size_t expected = 0;
  const auto count = [&](const std::string& name, const auto& value) {
    using T = std::decay_t<decltype(value)>;
    if constexpr (std::is_enum_v<T>) {
      for (const auto each : Names<T>::kAll) {
        EXPECT_EQ(seen.count(name + " " + std::string(each)), 1) << each;
        ++expected;
      }
    } else {
      EXPECT_EQ(seen.count(name), 1) << name;
      ++expected;
    }
  };
  const Spec spec;
  visit_fields(spec, count);
  const LayerSpec layer;
  visit_fields_of_layer(layer, count);
  count("kind", Kind());
  EXPECT_EQ(seen.size(), expected);
}

} // namespace
} // namespace fsdp::random_models
