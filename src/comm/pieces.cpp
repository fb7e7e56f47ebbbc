#include "comm/pieces.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace fsdp::detail {

void check_pieces(
    std::span<const Piece> pieces,
    int64_t total,
    int64_t element,
    const std::string& what) {
  int64_t end = 0;
  for (const auto& piece : pieces) {
    const int64_t bytes = std::ssize(piece.bytes);
    if (piece.offset < end || piece.offset % element != 0 ||
        bytes % element != 0 || bytes > total - piece.offset) {
      throw std::invalid_argument(
          what + ": a piece of " + std::to_string(bytes) + " bytes at offset " +
          std::to_string(piece.offset) +
          ": expected pieces in ascending order, of whole elements of " +
          std::to_string(element) + " bytes, inside of " +
          std::to_string(total) + " bytes; the piece before ends at " +
          std::to_string(end) + ".");
    }
    end = piece.offset + bytes;
  }
}

void visit_pieces(
    std::span<const Piece> pieces,
    size_t begin,
    size_t end,
    const std::function<
        void(size_t offset, const std::byte* data, size_t bytes)>& visit) {
  const auto end_of = [](const Piece& piece) {
    return static_cast<size_t>(piece.offset) + piece.bytes.size();
  };
  auto piece = std::partition_point(
      pieces.begin(), pieces.end(), [&](const Piece& each) {
        return end_of(each) <= begin;
      });
  for (size_t at = begin; at < end;) {
    const size_t next = piece == pieces.end()
        ? end
        : std::min(end, static_cast<size_t>(piece->offset));
    if (at < next) {
      visit(at, nullptr, next - at);
      at = next;
      continue;
    }
    const size_t stop = std::min(end, end_of(*piece));
    if (at < stop) {
      const size_t offset = at - static_cast<size_t>(piece->offset);
      visit(at, piece->bytes.data() + offset, stop - at);
    }
    at = stop;
    ++piece;
  }
}

void copy_pieces(
    std::byte* to,
    std::span<const Piece> pieces,
    size_t begin,
    size_t end,
    Stores stores) {
  visit_pieces(
      pieces,
      begin,
      end,
      [&](size_t offset, const std::byte* data, size_t bytes) {
        if (data == nullptr) {
          std::memset(to + (offset - begin), 0, bytes);
        } else {
          copy_bytes(to + (offset - begin), data, bytes, stores);
        }
      });
}

} // namespace fsdp::detail
