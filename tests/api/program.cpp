#include "api/program.h"

#include <algorithm>
#include <map>
#include <unordered_set>

namespace fsdp::testing {

std::mutex& build_lock() {
  static std::mutex mutex;
  return mutex;
}

at::Tensor wave(at::IntArrayRef sizes, double frequency) {
  const auto numel = c10::multiply_integers(sizes);
  const auto steps = torch::arange(numel, torch::kDouble);
  return torch::sin(steps * frequency + 0.3)
      .to(torch::get_default_dtype())
      .view(sizes)
      .clone();
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

NamedValues distinct_parameters(const torch::nn::Module& module) {
  NamedValues values;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& each : module.named_parameters()) {
    if (seen.insert(each.value().unsafeGetTensorImpl()).second) {
      values.emplace_back(each.key(), each.value());
    }
  }
  return values;
}

std::vector<at::Tensor> tensors_of(const NamedValues& values) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : values) {
    tensors.push_back(tensor);
  }
  return tensors;
}

namespace {

/// "1" and the bytes of a gradient, or "0".
std::string encode(const at::Tensor& gradient) {
  if (!gradient.defined()) {
    return "0";
  }
  const auto flat = gradient.detach().contiguous();
  return "1" +
      std::string(
             static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
}

at::Tensor decode(
    const std::vector<std::string>& parts,
    const NetDescription::Parameter& parameter) {
  auto whole = torch::empty(parameter.sizes, parameter.dtype);
  std::string bytes;
  size_t replica = 0; // bytes of it that were compared
  for (const auto& part : parts) {
    EXPECT_EQ(part[0], parts[0][0])
        << "only some ranks have a gradient of " << parameter.names.front();
    const auto mine = part.substr(1);
    if (bytes.size() < whole.nbytes()) {
      bytes += mine;
      continue;
    }
    EXPECT_EQ(bytes.compare(replica, mine.size(), mine), 0)
        << "replicas differ: " << parameter.names.front();
    replica = (replica + mine.size()) % std::max<size_t>(bytes.size(), 1);
  }
  if (parts[0][0] == '0') {
    return {};
  }
  EXPECT_EQ(replica, 0U) << parameter.names.front();
  EXPECT_EQ(bytes.size(), whole.nbytes()) << parameter.names.front();
  if (bytes.size() == whole.nbytes()) {
    std::copy(
        bytes.begin(),
        bytes.end(),
        static_cast<char*>(whole.mutable_data_ptr()));
  }
  return whole;
}

} // namespace

NamedValues whole_gradients(ShardedModule& net) {
  NamedValues values;
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, tensor] : net.named_parameters()) {
    tensors[name] = tensor;
  }
  for (const auto& unit : net.describe().units) {
    const bool replicated = unit.strategy == Strategy::kNoShard;
    for (const auto& parameter : unit.parameters) {
      const auto& name = parameter.names.front();
      const auto& tensor = tensors.at(name);
      const auto& grad = tensor.grad();
      if (grad.defined()) {
        EXPECT_EQ(grad.sizes(), tensor.sizes()) << name;
        EXPECT_EQ(
            grad.numel(),
            replicated ? c10::multiply_integers(parameter.sizes)
                       : parameter.local_numel)
            << name;
        EXPECT_EQ(grad.scalar_type(), parameter.dtype) << name;
      }
      const auto parts = net.world().communicator().exchange(
          encode(grad), "gradients of a test");
      values.emplace_back(name, decode(parts, parameter));
    }
  }
  return values;
}

std::vector<int64_t> half_of_the_ranks(int world_size) {
  return world_size % 2 == 0 ? std::vector<int64_t>{world_size / 2}
                             : std::vector<int64_t>{};
}

std::vector<int64_t> all_shard_sizes(int world_size) {
  std::vector<int64_t> sizes;
  for (int64_t size = 1; size <= world_size; ++size) {
    if (world_size % size == 0) {
      sizes.push_back(size);
    }
  }
  return sizes;
}

at::Tensor Log::rows() const {
  return rows_of_rank(world_);
}

void Log::loss(const at::Tensor& value) {
  this->value("loss", mean_over_ranks(world_, value.item<double>()));
}

void Log::value(std::string label, const at::Tensor& tensor) {
  values_.emplace_back(
      std::move(label), tensor.defined() ? tensor.detach().clone() : tensor);
}

void Log::add_sorted(const std::string& kind, NamedValues values) {
  std::sort(values.begin(), values.end(), [](const auto& a, const auto& b) {
    return a.first < b.first;
  });
  for (auto& [name, tensor] : values) {
    values_.emplace_back(kind + name, std::move(tensor));
  }
}

void expect_same_log(
    const Log& expected,
    const Log& actual,
    const ProgramSettings& settings) {
  ASSERT_EQ(expected.values().size(), actual.values().size());
  for (size_t i = 0; i < expected.values().size(); ++i) {
    const auto& [label, wanted] = expected.values()[i];
    const auto& [actual_label, got] = actual.values()[i];
    ASSERT_EQ(label, actual_label) << "entry " << i;
    if (std::find(settings.skip.begin(), settings.skip.end(), label) !=
        settings.skip.end()) {
      continue;
    }
    ASSERT_EQ(wanted.defined(), got.defined()) << label << ", entry " << i;
    if (wanted.defined()) {
      EXPECT_TRUE(
          all_close(got, wanted, settings.tolerance, settings.tolerance / 100))
          << label << ", entry " << i;
    }
  }
}

void expect_same_bits(const NamedValues& expected, const NamedValues& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto& [label, wanted] = expected[i];
    const auto& got = actual[i].second;
    ASSERT_EQ(wanted.defined(), got.defined()) << label;
    EXPECT_TRUE(!wanted.defined() || at::equal(wanted, got))
        << "bits of " << label << ", entry " << i;
  }
}

} // namespace fsdp::testing
