#include "api/agreement.h"

#include "api/strategy_name.h"
#include "runtime/errors.h"
#include "runtime/internal_guard.h"
#include "runtime/tensor_bytes.h"

#include <fsdp/version.h>

#include <ATen/ATen.h>
#include <c10/util/irange.h>
#include <torch/version.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iomanip>
#include <map>
#include <sstream>

namespace fsdp::detail {

namespace {

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(line);
  }
  return lines;
}

std::string line_at(const std::vector<std::string>& lines, size_t index) {
  return index < lines.size() ? lines[index] : "(nothing)";
}

std::string dtype_text(const std::optional<at::ScalarType>& dtype) {
  return dtype.has_value() ? c10::toString(*dtype) : "unchanged";
}

std::string describe(const UnitSpec& unit) {
  std::ostringstream line;
  line << "unit '" << unit.name << "': strategy "
       << strategy_name(unit.strategy) << ", param_dtype "
       << dtype_text(unit.mixed_precision.param_dtype) << ", reduce_dtype "
       << dtype_text(unit.mixed_precision.reduce_dtype) << ", buffer_dtype "
       << dtype_text(unit.mixed_precision.buffer_dtype) << ", cast_inputs "
       << unit.mixed_precision.cast_inputs << ", reshard_after_forward_to "
       << unit.part_ranks;
  return line.str();
}

std::string describe(const Parameter& parameter) {
  std::ostringstream line;
  line << "parameter";
  for (const auto& name : parameter.names) {
    line << " '" << name << "'";
  }
  line << ": shape " << parameter.tensor.sizes() << ", dtype "
       << parameter.tensor.scalar_type() << ", requires_grad "
       << parameter.tensor.requires_grad() << ", full_precision "
       << parameter.full_precision;
  return line.str();
}

} // namespace

uint64_t checksum(const at::Tensor& tensor) {
  const InternalGuard internal;
  const auto flat = tensor.detach().contiguous().cpu();
  const auto* bytes = static_cast<const unsigned char*>(flat.const_data_ptr());
  uint64_t hash = 1469598103934665603U; // FNV-1a, but over words
  for (size_t at = 0; at < flat.nbytes(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, std::min(sizeof(word), flat.nbytes() - at));
    hash = (hash ^ word) * 1099511628211U;
    hash ^= hash >> 32; // high bits would only reach higher ones
  }
  return hash;
}

void fail_together(const World& world, const std::function<void()>& prepare) {
  std::exception_ptr error;
  std::string text;
  try {
    prepare();
  } catch (const std::exception& caught) {
    error = std::current_exception();
    text = text_of(caught);
  }
  const auto texts = communicate([&] {
    return world.communicator().exchange(text, "preparation of the net");
  });
  if (error) {
    std::rethrow_exception(error);
  }
  for (const auto rank : c10::irange(texts.size())) {
    TORCH_CHECK_VALUE(
        texts[rank].empty(),
        rank_text(static_cast<int>(rank), world.size()),
        " failed: ",
        texts[rank]);
  }
}

void check_same_lines(
    const World& world,
    const std::vector<std::string>& lines,
    const std::string& advice,
    int color) {
  std::string mine = std::to_string(color) + "\n";
  for (const auto& line : lines) {
    mine += line + "\n";
  }
  const auto all = communicate([&] {
    return world.communicator().exchange(mine, "comparison of the ranks");
  });
  std::map<std::string, std::pair<int, std::vector<std::string>>> first_of;
  const auto size = static_cast<int>(all.size());
  for (const auto rank : c10::irange(size)) {
    const auto other = split_lines(all[static_cast<size_t>(rank)]);
    const auto [found, is_first] =
        first_of.emplace(other.front(), std::make_pair(rank, other));
    const auto& [first_rank, first] = found->second;
    if (is_first || first == other) {
      continue;
    }
    size_t at = 0;
    while (line_at(first, at) == line_at(other, at)) {
      ++at;
    }
    TORCH_CHECK_VALUE(
        false,
        "fsdp: the ranks differ: ",
        rank_text(first_rank, size),
        " has ",
        line_at(first, at),
        ", but ",
        rank_text(rank, size),
        " has ",
        line_at(other, at),
        ". ",
        advice);
  }
}

void check_agreement(
    const World& world,
    const std::vector<UnitSpec>& specs,
    const NetSettings& settings,
    CompareValues values) {
  std::vector<std::string> lines;
  lines.push_back(
      std::string("libfsdp ") + version() + ", torch " +
      std::to_string(TORCH_VERSION_MAJOR) + "." +
      std::to_string(TORCH_VERSION_MINOR));
  std::ostringstream options;
  options << std::setprecision(17) << "gradient_divide_factor "
          << settings.divide_factor << ", slots " << settings.slots
          << ", shard_size " << settings.shard_size << ", sync_module_states "
          << (values == CompareValues::kNo);
  lines.push_back(options.str());
  for (const auto& unit : specs) {
    lines.push_back(describe(unit));
    for (const auto& parameter : unit.parameters) {
      lines.push_back(describe(parameter));
    }
  }
  check_same_lines(
      world, lines, "Build the same model with the same options on all ranks.");
  if (values == CompareValues::kNo || world.size() == 1) {
    return;
  }
  lines.clear();
  for (const auto& unit : specs) {
    for (const auto& parameter : unit.parameters) {
      lines.push_back(
          "parameter '" + parameter.name() + "' with values of checksum " +
          std::to_string(checksum(parameter.tensor)));
    }
  }
  check_same_lines(
      world,
      lines,
      "Each rank would keep its part of another model: seed all ranks alike"
      " (torch::manual_seed) before the model is built, or set"
      " Options::sync_module_states(true) to take the values of rank 0.");
}

void broadcast_tensors(
    const World& world,
    const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  const InternalGuard internal;
  for (const auto& [name, tensor] : tensors) {
    auto flat = tensor.detach().contiguous();
    communicate([&] {
      world.communicator()
          .broadcast(bytes_of(flat), 0, "broadcast of '" + name + "'")
          ->wait();
    });
    if (!flat.is_alias_of(tensor)) {
      tensor.detach().copy_(flat);
    }
  }
}

} // namespace fsdp::detail
