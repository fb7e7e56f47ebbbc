#pragma once

#include "comm/call.h" // rank_text

#include <fsdp/communicator.h>

#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <utility>

namespace fsdp::detail {

/// The text of an exception, without the stack trace that libtorch adds.
inline std::string text_of(const std::exception& error) {
  if (const auto* torch_error = dynamic_cast<const c10::Error*>(&error)) {
    return torch_error->what_without_backtrace();
  }
  return error.what();
}

/// Runs `call`; a CommunicationError leaves as libtorch's DistBackendError.
template <class F>
decltype(auto) communicate(F&& call) {
  try {
    return std::forward<F>(call)();
  } catch (const CommunicationError& error) {
    TORCH_CHECK_WITH(DistBackendError, false, error.what());
  }
}

} // namespace fsdp::detail
