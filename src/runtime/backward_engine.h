#pragma once

namespace fsdp::detail {

/// Makes the engine that opens backward regions the default engine of this
/// process. An engine of the program keeps working inside of it, whether it was
/// installed before or after. Cheap when nothing has changed.
void install_backward_engine();

/// Whether this thread runs a node of a backward pass.
bool inside_backward_pass();

} // namespace fsdp::detail
