// Which modules become units.

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <set>

namespace fsdp::testing {
namespace units {

namespace nn = torch::nn;
using at::Tensor;
using Names = std::vector<std::string>;
using UnitNames = std::vector<std::pair<std::string, Names>>;

/// Names of the units of a network, each with the names of its parameters.
template <class Make = decltype(&make_network)>
UnitNames units_of(const Options& options, Make make = &make_network) {
  FullyShardedDataParallel net(seeded(make), World(), options);
  UnitNames result;
  for (const auto& unit : net.describe().units) {
    Names names;
    for (const auto& parameter : unit.parameters) {
      names.insert(names.end(), parameter.names.begin(), parameter.names.end());
    }
    result.emplace_back(unit.name, std::move(names));
  }
  return result;
}

Names unit_names(const UnitPolicy& policy) {
  Names names;
  for (const auto& [name, parameters] : units_of(Options().units(policy))) {
    names.push_back(name);
  }
  return names;
}

std::string policy_error(const UnitPolicy& policy) {
  return error_of([&] { unit_names(policy); });
}

/// The names below `prefix` of all parameters of a block.
Names block_names(const std::string& prefix) {
  return {
      prefix + ".norm.weight",
      prefix + ".norm.bias",
      prefix + ".up.weight",
      prefix + ".up.bias",
      prefix + ".down.weight",
      prefix + ".down.bias"};
}

TEST(Units, WithoutAPolicyTheModelIsOneUnit) {
  const auto units = units_of(Options());
  ASSERT_EQ(units.size(), 1U);
  EXPECT_EQ(units[0].second.size(), seeded(make_network)->parameters().size());
}

TEST(Units, TheRootTakesWhatIsLeft) {
  const auto units = units_of(Options().units(each<Block>()));
  ASSERT_EQ(units.size(), 3U);
  EXPECT_EQ(
      units[0].second,
      (Names{
          "input.weight",
          "input.bias",
          "norm.weight",
          "norm.bias",
          "head.weight",
          "head.bias"}));
  EXPECT_EQ(
      units[1],
      std::make_pair(std::string("layers.0"), block_names("layers.0")));
  EXPECT_EQ(
      units[2],
      std::make_pair(std::string("layers.1"), block_names("layers.1")));
}

TEST(Units, EachTakesHoldersImplsAndSeveralTypes) {
  EXPECT_EQ(unit_names(each<Block>()), unit_names(each<BlockImpl>()));
  EXPECT_EQ(
      (unit_names(each<Block, nn::LayerNorm>())),
      (Names{
          "(root)",
          "layers.0",
          "layers.0.norm",
          "layers.1",
          "layers.1.norm",
          "norm"}));
}

struct WideBlock : BlockImpl {
  using BlockImpl::BlockImpl;
};

TEST(Units, EachTakesDerivedClasses) {
  const auto make = [] {
    auto network = std::make_shared<NetworkImpl>(1);
    network->layers->push_back(std::make_shared<WideBlock>(5));
    return network;
  };
  EXPECT_EQ(units_of(Options().units(each<Block>()), make).size(), 3U);
  EXPECT_EQ(units_of(Options().units(each<WideBlock>()), make).size(), 2U);
}

TEST(Units, NamedMatchesInsideOnePartOfAName) {
  EXPECT_EQ(
      unit_names(named("layers.*")), (Names{"(root)", "layers.0", "layers.1"}));
  EXPECT_EQ(
      unit_names(named("layers.*.up")),
      (Names{"(root)", "layers.0.up", "layers.1.up"}));
  EXPECT_EQ(unit_names(named("layers.1")), (Names{"(root)", "layers.1"}));
  EXPECT_EQ(unit_names(named("layers.[02-9]")), (Names{"(root)", "layers.0"}));
  EXPECT_EQ(unit_names(named("in?ut")), (Names{"(root)", "input"}));
  EXPECT_EQ(unit_names(named("*")), (Names{"input", "layers", "norm", "head"}));
}

TEST(Units, TogetherMakesOneUnitOfSeveralModules) {
  const auto units =
      units_of(Options().units(each<Block>() | together({"norm", "head"})));
  ASSERT_EQ(units.size(), 4U);
  std::map<std::string, Names> by_name(units.begin(), units.end());
  EXPECT_EQ(by_name["(root)"], (Names{"input.weight", "input.bias"}));
  EXPECT_EQ(
      by_name["norm"],
      (Names{"norm.weight", "norm.bias", "head.weight", "head.bias"}));
}

TEST(Units, TwoTogetherPoliciesMakeTwoUnits) {
  const auto units = units_of(
      Options().units(together({"layers.*"}) | together({"input", "head"})));
  ASSERT_EQ(units.size(), 3U);
  std::map<std::string, Names> by_name(units.begin(), units.end());
  EXPECT_EQ(by_name["layers.0"].size(), 12U);
  EXPECT_EQ(by_name["input"].size(), 4U);
  EXPECT_EQ(by_name["(root)"], (Names{"norm.weight", "norm.bias"}));
}

TEST(Units, AtLeastCountsWhatIsNotTaken) {
  // A block has 10 + 66 + 60 = 136 elements; up 66, down 60, head 12, input 20.
  EXPECT_EQ(
      unit_names(at_least(130)), (Names{"(root)", "layers.0", "layers.1"}));
  EXPECT_EQ(unit_names(at_least(137)), (Names{"(root)", "layers"}));
  EXPECT_EQ(unit_names(at_least(272)), (Names{"(root)", "layers"}));
  EXPECT_EQ(
      unit_names(at_least(66)),
      (Names{"(root)", "layers.0", "layers.0.up", "layers.1", "layers.1.up"}));
  const auto error = policy_error(at_least(273));
  EXPECT_TRUE(contains(error, "at_least(273)")) << error;
}

TEST(Units, WhenAsksWithNameAndModule) {
  std::set<std::string> asked;
  const auto names = unit_names(when(
      [&](const std::string& name,
          const nn::Module& module) -> std::optional<UnitOptions> {
        asked.insert(name);
        const bool block = dynamic_cast<const BlockImpl*>(&module) != nullptr;
        return block && name.ends_with("1") ? std::optional(UnitOptions())
                                            : std::nullopt;
      }));
  EXPECT_EQ(names, (Names{"(root)", "layers.1"}));
  EXPECT_EQ(asked.count(""), 0U); // never asked about the root
  EXPECT_EQ(asked.count("layers.0.norm"), 1U);
}

TEST(Units, TheFirstMatchWins) {
  const auto strategies = [](const UnitPolicy& policy) {
    FullyShardedDataParallel net(
        seeded(make_network), World(), Options().units(policy));
    std::map<std::string, Strategy> result;
    for (const auto& unit : net.describe().units) {
      result[unit.name] = unit.strategy;
    }
    return result;
  };
  const auto special =
      named("layers.1", UnitOptions().strategy(Strategy::kNoShard));
  const auto first = strategies(special | each<Block>());
  EXPECT_EQ(first.at("layers.0"), Strategy::kFullShard);
  EXPECT_EQ(first.at("layers.1"), Strategy::kNoShard);
  // The other way round nothing is left for the special one: an error.
  const auto error = policy_error(each<Block>() | special);
  EXPECT_TRUE(contains(error, "named(\"layers.1\")")) << error;
  EXPECT_TRUE(contains(error, "an earlier policy")) << error;
}

TEST(Units, OptionsOfAUnitOverrideThoseOfTheNet) {
  FullyShardedDataParallel net(
      seeded(make_network),
      World(),
      Options()
          .strategy(Strategy::kShardGradOp)
          .units(
              named("layers.0", UnitOptions().strategy(Strategy::kFullShard)) |
              together(
                  {"norm", "head"},
                  UnitOptions().strategy(Strategy::kNoShard)) |
              at_least(100)));
  std::map<std::string, Strategy> strategies;
  for (const auto& unit : net.describe().units) {
    strategies[unit.name] = unit.strategy;
  }
  EXPECT_EQ(strategies.at("layers.0"), Strategy::kFullShard);
  EXPECT_EQ(strategies.at("norm"), Strategy::kNoShard);
  EXPECT_EQ(strategies.at("layers.1"), Strategy::kShardGradOp);
  EXPECT_EQ(strategies.at("(root)"), Strategy::kShardGradOp);
}

TEST(Units, KeepingWeightsAfterForwardIsShardGradOp) {
  FullyShardedDataParallel net(
      seeded(make_network),
      World(),
      Options().units(each<Block>(UnitOptions().reshard_after_forward(false))));
  const auto units = net.describe().units;
  EXPECT_EQ(units[0].strategy, Strategy::kFullShard);
  EXPECT_EQ(units[1].strategy, Strategy::kShardGradOp);
}

TEST(Units, ReshardingAfterForwardOverridesShardGradOp) {
  FullyShardedDataParallel net(
      seeded(make_network),
      World(),
      Options()
          .strategy(Strategy::kShardGradOp)
          .units(each<Block>(UnitOptions().reshard_after_forward(true))));
  const auto units = net.describe().units;
  EXPECT_EQ(units[0].strategy, Strategy::kShardGradOp);
  EXPECT_EQ(units[1].strategy, Strategy::kFullShard);
}

TEST(Units, APolicyWithoutAMatchListsTheModules) {
  for (const auto& [policy, text] :
       std::vector<std::pair<UnitPolicy, std::string>>{
           {each<nn::Conv2d>(), "each<torch::nn::Conv2d>()"},
           {named("layer.*"), "named(\"layer.*\")"},
           {together({"a", "b.*"}), "together({\"a\", \"b.*\"})"},
           {when([](const auto&, const auto&) {
              return std::optional<UnitOptions>();
            }),
            "when(...)"},
           {each<Block>() | named("heads"), "named(\"heads\")"}}) {
    const auto error = policy_error(policy);
    EXPECT_TRUE(contains(error, text)) << error;
    EXPECT_TRUE(contains(error, "matches no module")) << error;
    EXPECT_TRUE(contains(error, "'layers.1.up': torch::nn::LinearImpl"))
        << error;
    EXPECT_TRUE(contains(error, "'head': torch::nn::LinearImpl")) << error;
    EXPECT_TRUE(contains(error, "BlockImpl")) << error;
  }
  EXPECT_THROW(unit_names(named("nothing")), c10::ValueError);
}

TEST(Units, APatternOfTogetherThatMatchesNothingIsAnError) {
  const auto error = policy_error(together({"norm", "haed"}));
  EXPECT_TRUE(contains(error, "haed")) << error;
}

TEST(Units, ALongListOfModulesIsCut) {
  const auto error = error_of([] {
    units_of(Options().units(each<nn::Conv2d>()), [] {
      return std::make_shared<NetworkImpl>(30);
    });
  });
  EXPECT_TRUE(contains(error, " more")) << error;
  EXPECT_LT(error.size(), 6000U);
}

TEST(Units, APolicyWorksInAnyWorldAndModel) {
  ProgramSettings settings;
  settings.options.units(
      each<Block>(UnitOptions().reshard_after_forward(false)) |
      together({"norm", "head"}) | at_least(20));
  const auto train = [](auto& net, Log& log) {
    torch::optim::SGD optimizer(net.parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      auto loss = net(log.mine(wave({kRows, 3}))).pow(2).mean();
      loss.backward();
      log.loss(loss);
      optimizer.step();
      optimizer.zero_grad();
    }
    log.parameters(net);
  };
  expect_same_program(make_network, train, settings);
  settings.type = at::kFloat;
  settings.tolerance = 1e-6;
  expect_same_program(make_network, train, settings);
}

TEST(Units, NestedUnitsTakeWhatIsLeftOfTheirs) {
  const auto units =
      units_of(Options().units(named("layers.0.up") | named("layers.*")));
  std::map<std::string, Names> by_name(units.begin(), units.end());
  EXPECT_EQ(
      by_name["layers.0.up"],
      (Names{"layers.0.up.weight", "layers.0.up.bias"}));
  EXPECT_EQ(by_name["layers.0"].size(), 4U);
  EXPECT_EQ(by_name["layers.1"].size(), 6U);
}

TEST(Units, OptionsCanBeReadBack) {
  const auto options = Options()
                           .strategy(Strategy::kNoShard)
                           .units(each<Block>() | named("head"))
                           .ignore({"input"})
                           .sync_module_states(true)
                           .gradient_divide_factor(3)
                           .slots(4)
                           .mixed_precision({.reduce_dtype = torch::kFloat});
  EXPECT_EQ(options.strategy(), Strategy::kNoShard);
  EXPECT_EQ(options.units().rules().size(), 2U);
  EXPECT_EQ(options.ignore(), Names{"input"});
  EXPECT_TRUE(options.sync_module_states());
  EXPECT_EQ(options.gradient_divide_factor(), 3.0);
  EXPECT_EQ(options.slots(), 4);
  EXPECT_EQ(options.mixed_precision().reduce_dtype, torch::kFloat);
  EXPECT_FALSE(options.mixed_precision().param_dtype.has_value());
  EXPECT_TRUE(options.mixed_precision().cast_inputs);
  EXPECT_EQ(Options().strategy(), Strategy::kFullShard);
  EXPECT_EQ(Options().slots(), 2);
}

} // namespace units
} // namespace fsdp::testing
