#pragma once

#include "runtime/unit_storage.h"

#include <ATen/core/Tensor.h>

namespace fsdp::detail {

class FlatGroup;
class Net;

/// Puts the hook in place that takes whole gradients when autograd has
/// accumulated them. libtorch has one slot for such a hook per parameter; a
/// hook of the program that is found there is kept, and runs after the gradient
/// was reduced and assigned. Cheap when nothing has changed.
void install_arrival_hooks(FlatGroup& group);

/// Gives the slots back to the program.
void remove_arrival_hooks(FlatGroup& group);

/// Runs the program's own hook of a parameter that has got a gradient.
void run_replaced_hook(const at::Tensor& parameter);

/// The net that takes the gradients of `variable`, or null.
Net* net_of(const at::Tensor& variable);

} // namespace fsdp::detail
