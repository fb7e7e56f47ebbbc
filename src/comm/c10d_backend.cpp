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
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception of an unknown type";
  }
}

} // namespace fsdp::detail
