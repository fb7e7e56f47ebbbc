#include "comm/file_descriptor.h"

#include <unistd.h>

#include <utility>

namespace fsdp::detail {

FileDescriptor::FileDescriptor(const ForkHold& hold, int descriptor)
    : descriptor_(descriptor),
      generation_(fork_generation()) {
  if (descriptor >= 0) {
    hold.close_in_children(descriptor);
  }
}

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      generation_(other.generation_) {
}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    reset();
    descriptor_ = std::exchange(other.descriptor_, -1);
    generation_ = other.generation_;
  }
  return *this;
}

int FileDescriptor::get() const {
  return generation_ == fork_generation() ? descriptor_ : -1;
}

void FileDescriptor::reset() {
  const int descriptor = get();
  if (descriptor >= 0) {
    const ForkHold hold;
    hold.forget(descriptor);
    ::close(descriptor);
  }
  descriptor_ = -1;
}

} // namespace fsdp::detail
