#pragma once

// Declarations only; see gloo/context.h.

namespace gloo::transport {

class Device;

} // namespace gloo::transport
