#include "launch/node_list.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using Names = std::vector<std::string>;

void expect_nodes(const std::string& list, const Names& names) {
  EXPECT_EQ(detail::expand_node_list(list), names) << list;
}

TEST(NodeList, OneName) {
  expect_nodes("node1", {"node1"});
}

TEST(NodeList, Names) {
  expect_nodes("a,b-1,c.example", {"a", "b-1", "c.example"});
}

TEST(NodeList, RangesKeepTheirZeros) {
  expect_nodes(
      "node[03-05,9],other", {"node03", "node04", "node05", "node9", "other"});
  expect_nodes("n[008-011]", {"n008", "n009", "n010", "n011"});
  expect_nodes("n[9-10]", {"n9", "n10"});
}

TEST(NodeList, WhatFollowsBrackets) {
  expect_nodes("n[1-2]-ib,x", {"n1-ib", "n2-ib", "x"});
}

TEST(NodeList, SeveralBrackets) {
  expect_nodes("r[1-2]n[7,9]", {"r1n7", "r1n9", "r2n7", "r2n9"});
}

TEST(NodeList, OneNumber) {
  expect_nodes("n[7]", {"n7"});
}

TEST(NodeList, WhatIsNotWellFormed) {
  for (const std::string list : {"",           ",",
                                 "a,",         ",a",
                                 "a[",         "a]",
                                 "a[]",        "a[1",
                                 "a[1-",       "a[1-]",
                                 "a[-1]",      "a[2-1]",
                                 "a[x]",       "a[1-x]",
                                 "a[1,]",      "a[[1]]",
                                 "a[1]]",      "a[1 ]",
                                 "a[1-2-3]",   "a[0-99999999]",
                                 "a[1-65537]", "a[1-400]b[1-400]"}) {
    EXPECT_FALSE(detail::expand_node_list(list).has_value()) << list;
  }
}

TEST(NodeList, AsManyAsAllowed) {
  EXPECT_EQ(detail::expand_node_list("a[1-65536]")->size(), 65536u);
  EXPECT_FALSE(detail::expand_node_list("a[1-65536],b").has_value());
}

TEST(TaskList, Counts) {
  EXPECT_EQ(detail::expand_task_list("4"), std::vector<int>({4}));
  EXPECT_EQ(detail::expand_task_list("2(x3),1"), std::vector({2, 2, 2, 1}));
  EXPECT_EQ(detail::expand_task_list("1,2(x1)"), std::vector({1, 2}));
}

TEST(TaskList, WhatIsNotWellFormed) {
  for (const std::string list :
       {"",
        "x",
        "0",
        "2(x)",
        "2(x0)",
        "2(x2",
        "2(3)",
        "2x3",
        "2(x3),",
        "(x2)",
        "-2",
        "2(x99999999)",
        "2(x2)3"}) {
    EXPECT_FALSE(detail::expand_task_list(list).has_value()) << list;
  }
}

} // namespace
} // namespace fsdp::testing
