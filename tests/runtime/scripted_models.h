#pragma once

#include "harness/parity.h"

#include <torch/script.h>

#include <functional>
#include <memory>
#include <string>

namespace fsdp::testing {

/// A small TorchScript model: an embedding that is tied to the output, and
/// three blocks with much for a fuser.
struct Scripted {
  torch::jit::Module module;
  at::Tensor words; // (kRows, 6)

  Scripted();
  at::Tensor loss(const at::Tensor& rows);
};

/// The parameters of a TorchScript module; one unit for each direct child with
/// parameters, one for the module's own.
NamedUnits units_of(const torch::jit::Module& module);

/// The same module, written to a stream and read again.
torch::jit::Module reread(const torch::jit::Module& module);

/// A model for expect_same_training; `change` makes another module of it.
MakeModel scripted_model(std::function<void(Scripted&)> change = [](Scripted&) {
});

/// One such model, built under the lock and with the seed of build().
std::shared_ptr<Scripted> build_scripted(
    const std::function<void(Scripted&)>& change = [](Scripted&) {});

/// What `module` computes without autograd.
at::Tensor evaluate(const torch::jit::Module& module, const at::Tensor& input);

} // namespace fsdp::testing
