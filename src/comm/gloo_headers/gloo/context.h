#pragma once

// libtorch's ProcessGroupGloo.hpp includes headers of Gloo, which no package of
// libtorch contains, although libtorch_cpu exports the symbols. The headers in
// this folder declare as much as that header needs to be read. Nothing here may
// be constructed or derived from: only libtorch knows the real layouts.

#include <chrono>
#include <memory>

namespace gloo {

namespace transport {
class UnboundBuffer;
} // namespace transport

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

} // namespace gloo
