#pragma once

#include "comm/call.h"

#include <string>
#include <string_view>

namespace fsdp::detail {

/// A call as bytes that another process can read. Equal calls, and no others,
/// have equal bytes.
std::string encode_call(const Call& call);
Call decode_call(std::string_view bytes);

} // namespace fsdp::detail
