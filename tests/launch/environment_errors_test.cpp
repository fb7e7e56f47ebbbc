#include "launch/launcher_variables.h"

#include <gtest/gtest.h>

#include <string>

namespace fsdp::testing {
namespace {

TEST(EnvironmentErrors, ARankWithoutASize) {
  expect_refused({{"RANK", "1"}}, {"RANK=\"1\"", "WORLD_SIZE is not"});
}

TEST(EnvironmentErrors, ASizeWithoutARank) {
  expect_refused({{"WORLD_SIZE", "2"}}, {"WORLD_SIZE=\"2\"", "RANK is not"});
  expect_refused(
      with(kMpich, {{"WORLD_SIZE", "2"}}),
      {"WORLD_SIZE=\"2\"", "MPICH", "3 processes"});
  expect_refused(
      without(kOpenMpi, "OMPI_COMM_WORLD_RANK"), {"OMPI_COMM_WORLD_RANK"});
}

TEST(EnvironmentErrors, WhatIsNoNumber) {
  for (const auto* text : {"x", "1x", " 1", "1 ", "-1", "+1", "0x1", "1.0"}) {
    expect_refused(
        with(kTorchrun, {{"RANK", text}}),
        {"RANK", std::string("\"") + text + "\"", "whole number"});
  }
  expect_refused(
      with(kTorchrun, {{"WORLD_SIZE", "99999999999999999999"}}),
      {"WORLD_SIZE", "99999999999999999999"});
  expect_refused(
      with(kTorchrun, {{"WORLD_SIZE", "0"}}), {"WORLD_SIZE", "\"0\""});
}

TEST(EnvironmentErrors, ARankThatIsTooLarge) {
  expect_refused(
      with(kTorchrun, {{"RANK", "8"}}),
      {"RANK", "\"8\"", "less than WORLD_SIZE=\"8\""});
  expect_refused(
      with(kTorchrun, {{"LOCAL_RANK", "4"}}),
      {"LOCAL_RANK", "\"4\"", "LOCAL_WORLD_SIZE=\"4\""});
  expect_refused(
      with(kMpich, {{"PMI_RANK", "3"}}), {"PMI_RANK", "PMI_SIZE=\"3\""});
  expect_refused(
      with(kSlurm, {{"SLURM_PROCID", "5"}}), {"SLURM_PROCID", "from 0 to 4"});
}

TEST(EnvironmentErrors, MoreRanksOnAHostThanInAll) {
  expect_refused(
      with(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}}),
      {"LOCAL_WORLD_SIZE", "\"9\"", "at most WORLD_SIZE=\"8\""});
  expect_refused(
      with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "6(x3)"}}),
      {"SLURM_STEP_TASKS_PER_NODE", "at most 5"});
}

TEST(EnvironmentErrors, HalfAnAddress) {
  expect_refused(
      without(kTorchrun, "MASTER_PORT"),
      {"MASTER_ADDR=\"node1\"", "MASTER_PORT is not"});
  expect_refused(
      without(kTorchrun, "MASTER_ADDR"),
      {"MASTER_PORT=\"29511\"", "MASTER_ADDR is not"});
  for (const auto* port : {"0", "65536", "http", "-1"}) {
    expect_refused(
        with(kTorchrun, {{"MASTER_PORT", port}}), {"MASTER_PORT", "65535"});
  }
}

TEST(EnvironmentErrors, SlurmListsThatMakeNoSense) {
  expect_refused(
      with(kSlurm, {{"SLURM_STEP_NODELIST", "node[3-"}}),
      {"SLURM_STEP_NODELIST", "node[3-"});
  expect_refused(
      with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "2(x"}}),
      {"SLURM_STEP_TASKS_PER_NODE", "2(x"});
  expect_refused(
      with(kSlurm, {{"SLURM_NODEID", "3"}}), {"SLURM_NODEID", "from 0 to 2"});
  expect_refused(
      without(without(kSlurm, "SLURM_STEP_NUM_TASKS"), "SLURM_NTASKS"),
      {"SLURM_STEP_NUM_TASKS", "not set"});
}

} // namespace
} // namespace fsdp::testing
