#include "launch/settings.h"

#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>
#include <string>

namespace fsdp::testing {
namespace {

using detail::Backend;
using detail::LogLevel;
using detail::Settings;

/// Of an environment of one variable.
Settings read(const std::string& name, const std::string& value) {
  return detail::read_settings(
      [&](const std::string& asked) -> std::optional<std::string> {
        return asked == name ? std::optional(value) : std::nullopt;
      });
}

void expect_refused(
    const std::string& name,
    const std::string& value,
    const std::string& expected) {
  try {
    read(name, value);
    FAIL() << name << "=" << value << " is accepted";
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find(name), std::string::npos) << text;
    EXPECT_NE(text.find("\"" + value + "\""), std::string::npos) << text;
    EXPECT_NE(text.find(expected), std::string::npos) << text;
  }
}

TEST(Settings, NothingIsSet) {
  const auto settings = read("OTHER", "1");
  EXPECT_FALSE(settings.backend.has_value());
  EXPECT_FALSE(settings.timeout.has_value());
  EXPECT_FALSE(settings.strategy.has_value());
  EXPECT_FALSE(settings.store.has_value());
  EXPECT_EQ(settings.log, LogLevel::kOff);
  EXPECT_FALSE(settings.debug);
}

TEST(Settings, Backends) {
  EXPECT_EQ(read("LIBFSDP_BACKEND", "shm").backend, Backend::kShm);
  EXPECT_EQ(read("LIBFSDP_BACKEND", "gloo").backend, Backend::kGloo);
  EXPECT_EQ(read("LIBFSDP_BACKEND", "single").backend, Backend::kSingle);
  for (const auto* name : {"nccl", "SHM", "gloo "}) {
    expect_refused("LIBFSDP_BACKEND", name, "shm, gloo or single");
  }
}

TEST(Settings, ATimeoutIsInSeconds) {
  using std::chrono::milliseconds;
  EXPECT_EQ(read("LIBFSDP_TIMEOUT", "2").timeout, milliseconds(2000));
  EXPECT_EQ(read("LIBFSDP_TIMEOUT", "0.25").timeout, milliseconds(250));
  EXPECT_EQ(read("LIBFSDP_TIMEOUT", "1e3").timeout, milliseconds(1'000'000));
  for (const auto* text :
       {"0", "-1", "0.0001", "1e10", "nan", "inf", "2s", " 2", "x"}) {
    expect_refused("LIBFSDP_TIMEOUT", text, "seconds");
  }
}

TEST(Settings, Strategies) {
  for (const auto* name :
       {"full_shard",
        "shard_grad_op",
        "shard_optimizer",
        "no_shard",
        "hybrid_shard",
        "hybrid_shard_grad_op"}) {
    EXPECT_EQ(read("LIBFSDP_STRATEGY", name).strategy, name);
  }
  expect_refused("LIBFSDP_STRATEGY", "FULL_SHARD", "full_shard");
}

TEST(Settings, Stores) {
  EXPECT_EQ(
      read("LIBFSDP_STORE", "tcp://node1:29500").store->text(),
      "tcp://node1:29500");
  const auto file = read("LIBFSDP_STORE", "file:///a b/c").store;
  EXPECT_EQ(file->path, "/a b/c");
  EXPECT_EQ(file->text(), "file:///a b/c");
  const auto address = read("LIBFSDP_STORE", "tcp://[::1]:7").store;
  EXPECT_EQ(address->host, "::1");
  EXPECT_EQ(address->port, 7);
  for (const auto* text :
       {"tcp://node1",
        "tcp://:1",
        "tcp://[]:1",
        "tcp://a:0",
        "tcp://a:65536",
        "tcp://a:b",
        "file://relative",
        "file:///",
        "/path",
        "http://a:1"}) {
    expect_refused("LIBFSDP_STORE", text, "tcp://HOST:PORT");
  }
}

TEST(Settings, LogLevels) {
  EXPECT_EQ(read("LIBFSDP_LOG", "off").log, LogLevel::kOff);
  EXPECT_EQ(read("LIBFSDP_LOG", "info").log, LogLevel::kInfo);
  EXPECT_EQ(read("LIBFSDP_LOG", "debug").log, LogLevel::kDebug);
  expect_refused("LIBFSDP_LOG", "verbose", "off, info or debug");
}

TEST(Settings, ExtraChecks) {
  EXPECT_TRUE(read("LIBFSDP_DEBUG", "1").debug);
  EXPECT_FALSE(read("LIBFSDP_DEBUG", "0").debug);
  expect_refused("LIBFSDP_DEBUG", "yes", "from 0 to 1");
}

} // namespace
} // namespace fsdp::testing
