#include "comm/c10d_backend.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace fsdp::detail {

void break_backend(c10d::Backend& backend) {
  try {
    if (auto* const tagged = dynamic_cast<TaggedBackend*>(&backend)) {
      tagged->break_connections();
    } else {
      backend.abort();
    }
  } catch (const std::exception&) {
    // It is being given up, whatever it says to that.
  }
}

std::chrono::milliseconds longer_than(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365);
  return std::min(timeout, kLongest) + std::chrono::minutes(1);
}

std::string c10d_text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return c10d_text_of(e);
  } catch (...) {
    return "an exception of an unknown type";
  }
}

std::string c10d_text_of(const std::exception& error) {
  const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace()
                                : error.what();
}

} // namespace fsdp::detail
