#pragma once

#include "comm/stream_copy.h"

#include <fsdp/communicator.h>

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace fsdp::detail {

/// Throws std::invalid_argument, which names `what`, unless the pieces are in
/// ascending order inside of `total` bytes and consist of whole elements of
/// `element` bytes.
void check_pieces(
    std::span<const Piece> pieces,
    int64_t total,
    int64_t element,
    const std::string& what);

/// Calls visit(offset, bytes) for the parts of [begin, end), in order and
/// without gaps; what no piece covers has a null pointer.
void visit_pieces(
    std::span<const Piece> pieces,
    size_t begin,
    size_t end,
    const std::function<
        void(size_t offset, const std::byte* data, size_t bytes)>& visit);

/// Copies the bytes [begin, end) to `to`.
void copy_pieces(
    std::byte* to,
    std::span<const Piece> pieces,
    size_t begin,
    size_t end,
    Stores stores = Stores::kCached);

} // namespace fsdp::detail
