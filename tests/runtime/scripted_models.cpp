#include "scripted_models.h"

#include <map>
#include <sstream>

namespace fsdp::testing {

namespace {

at::Tensor weight_of(at::IntArrayRef sizes) {
  return torch::randn(sizes).mul_(0.3).requires_grad_();
}

torch::jit::Module block() {
  torch::jit::Module module("Block");
  module.register_parameter("wide", weight_of({20, 15}), false);
  module.register_parameter("wide_bias", weight_of({20}), false);
  module.register_parameter("narrow", weight_of({15, 20}), false);
  module.register_parameter("scale", weight_of({15}), false);
  module.register_parameter("gain", weight_of({15}), false);
  module.register_parameter("shift", weight_of({15}), false);
  module.define(R"(
    def forward(self, x: Tensor) -> Tensor:
        y = torch.layer_norm(x, [15], self.scale, self.shift)
        y = torch.relu(torch.linear(y, self.wide, self.wide_bias))
        y = torch.linear(y, self.narrow)
        y = torch.sigmoid(y * self.gain + self.shift) * y + self.gain * torch.tanh(y)
        return x + y
  )");
  return module;
}

} // namespace

Scripted::Scripted() : module("Model") {
  module.register_parameter("table", weight_of({20, 15}), false);
  for (const auto* name : {"first", "second"}) {
    module.register_module(name, block());
  }
  module.register_parameter("head", weight_of({20, 15}), false);
  module.define(R"(
    def forward(self, words: Tensor) -> Tensor:
        x = torch.embedding(self.table, words)
        x = self.first.forward(x)
        x = self.second.forward(x)
        return torch.matmul(torch.linear(x, self.head), self.table)
  )");
  words = torch::randint(0, 20, {kRows, 6});
}

at::Tensor Scripted::loss(const at::Tensor& rows) {
  return module.forward({words.index_select(0, rows)}).toTensor().pow(2).mean();
}

NamedUnits units_of(const torch::jit::Module& module) {
  NamedUnits units;
  std::map<std::string, size_t> places;
  for (const auto& parameter : module.named_parameters()) {
    const auto dot = parameter.name.find('.');
    const auto name = dot == std::string::npos ? std::string("own")
                                               : parameter.name.substr(0, dot);
    const auto [place, fresh] = places.emplace(name, units.size());
    if (fresh) {
      units.push_back({name, {}});
    }
    units[place->second].second.emplace_back(parameter.name, parameter.value);
  }
  return units;
}

torch::jit::Module reread(const torch::jit::Module& module) {
  std::stringstream stream;
  module.save(stream);
  return torch::jit::load(stream);
}

MakeModel scripted_model(std::function<void(Scripted&)> change) {
  return [change = std::move(change)] {
    const auto owner = std::make_shared<Scripted>();
    change(*owner);
    return TestModel{
        units_of(owner->module),
        [owner](const at::Tensor& rows) { return owner->loss(rows); },
        owner};
  };
}

std::shared_ptr<Scripted> build_scripted(
    const std::function<void(Scripted&)>& change) {
  const auto model = build([&] {
    TestModel result;
    const auto owner = std::make_shared<Scripted>();
    change(*owner);
    result.owner = owner;
    return result;
  });
  return std::static_pointer_cast<Scripted>(model.owner);
}

at::Tensor evaluate(const torch::jit::Module& module, const at::Tensor& input) {
  const torch::NoGradGuard no_grad;
  auto same = module; // forward() is not const
  return same.forward({input}).toTensor();
}

} // namespace fsdp::testing
