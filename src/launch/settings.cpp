#include "launch/settings.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <stdexcept>

namespace fsdp::detail {

namespace {

constexpr int kHighestPort = 65535;

/// A host or IPv4 address, or an IPv6 address in brackets, and a port.
std::optional<StoreAddress> parse_host_and_port(const std::string& text) {
  const auto colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0) {
    return std::nullopt;
  }
  StoreAddress address;
  address.host = text.substr(0, colon);
  if (address.host.front() == '[' && address.host.back() == ']') {
    address.host = address.host.substr(1, address.host.size() - 2);
  }
  const auto port = parse_number(text.substr(colon + 1));
  if (address.host.empty() || !port || *port < 1 || *port > kHighestPort) {
    return std::nullopt;
  }
  address.port = static_cast<int>(*port);
  return address;
}

std::optional<StoreAddress> parse_store(const std::string& text) {
  const std::string tcp = "tcp://";
  const std::string file = "file://";
  if (text.starts_with(tcp)) {
    return parse_host_and_port(text.substr(tcp.size()));
  }
  if (text.starts_with(file + "/") && text.back() != '/') {
    StoreAddress address;
    address.path = text.substr(file.size());
    return address;
  }
  return std::nullopt;
}

std::optional<StoreAddress> read_store(const Variables& variables) {
  const auto text = variables.text("LIBFSDP_STORE");
  if (!text.has_value()) {
    return std::nullopt;
  }
  auto store = parse_store(*text);
  if (!store.has_value()) {
    variables.refuse(
        "LIBFSDP_STORE",
        "tcp://HOST:PORT or file:///PATH, where all hosts see PATH");
  }
  return store;
}

std::optional<std::chrono::milliseconds> read_timeout(
    const Variables& variables) {
  const auto text = variables.text("LIBFSDP_TIMEOUT");
  if (!text.has_value()) {
    return std::nullopt;
  }
  double seconds = 0.0;
  const char* const end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, seconds);
  constexpr double kLongest = 1e9;
  if (error != std::errc() || stop != end || !(seconds >= 0.001) ||
      seconds > kLongest) {
    variables.refuse(
        "LIBFSDP_TIMEOUT", "a number of seconds from 0.001 to 1e9");
  }
  return std::chrono::milliseconds(std::llround(seconds * 1000.0));
}

std::optional<std::string> read_strategy(const Variables& variables) {
  const auto name = variables.text("LIBFSDP_STRATEGY");
  constexpr std::array kNames = {
      "full_shard",
      "shard_grad_op",
      "shard_optimizer",
      "no_shard",
      "hybrid_shard",
      "hybrid_shard_grad_op"};
  if (name.has_value() &&
      std::find(kNames.begin(), kNames.end(), *name) == kNames.end()) {
    variables.refuse(
        "LIBFSDP_STRATEGY",
        "full_shard, shard_grad_op, shard_optimizer, no_shard, hybrid_shard or "
        "hybrid_shard_grad_op");
  }
  return name;
}

LogLevel read_log(const Variables& variables) {
  const auto name = variables.text("LIBFSDP_LOG").value_or("off");
  if (name == "info") {
    return LogLevel::kInfo;
  }
  if (name == "debug") {
    return LogLevel::kDebug;
  }
  if (name != "off") {
    variables.refuse("LIBFSDP_LOG", "off, info or debug");
  }
  return LogLevel::kOff;
}

} // namespace

Backend parse_backend(const std::string& name, const std::string& who) {
  for (const auto backend : {Backend::kSingle, Backend::kShm, Backend::kGloo}) {
    if (name == name_of(backend)) {
      return backend;
    }
  }
  throw std::invalid_argument(
      "fsdp: " + who + " is \"" + name +
      "\", but must be shm, gloo or single.");
}

std::string name_of(Backend backend) {
  switch (backend) {
    case Backend::kSingle:
      return "single";
    case Backend::kShm:
      return "shm";
    case Backend::kGloo:
      return "gloo";
  }
  return {};
}

std::string StoreAddress::text() const {
  if (!path.empty()) {
    return "file://" + path;
  }
  const bool is_ipv6 = host.find(':') != std::string::npos;
  return "tcp://" + (is_ipv6 ? "[" + host + "]" : host) + ":" +
      std::to_string(port);
}

Settings read_settings(const GetVariable& get) {
  const Variables variables(get);
  Settings settings;
  if (const auto name = variables.text("LIBFSDP_BACKEND")) {
    settings.backend =
        parse_backend(*name, "environment variable LIBFSDP_BACKEND");
  }
  settings.timeout = read_timeout(variables);
  settings.strategy = read_strategy(variables);
  settings.store = read_store(variables);
  settings.log = read_log(variables);
  settings.debug = variables.number("LIBFSDP_DEBUG", 0, 1).value_or(0) == 1;
  return settings;
}

} // namespace fsdp::detail
