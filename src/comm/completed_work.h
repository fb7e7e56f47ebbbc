#pragma once

#include <fsdp/communicator.h>

namespace fsdp::detail {

/// A collective that was complete when it was called.
class CompletedWork : public Work {
 public:
  bool ready() override { return true; }

  void wait() override {}
};

} // namespace fsdp::detail
