#pragma once

namespace fsdp::detail {

/// Makes the engine that opens backward regions the default engine of this
/// process. Done by the first net; cheap afterwards.
void install_backward_engine();

/// Whether this thread runs a node of a backward pass.
bool inside_backward_pass();

} // namespace fsdp::detail
