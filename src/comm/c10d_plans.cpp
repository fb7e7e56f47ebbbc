#include "comm/c10d_plans.h"

#include "comm/c10d_records.h"
#include "comm/call_codec.h"
#include "comm/reduce.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fsdp::detail {
namespace {

constexpr size_t kCopiedBytes = 64 << 10; // calls up to this size are copied
constexpr size_t kExchangeBlock = 1024;   // of the first round

void plan_copy(std::span<const std::byte> from, std::byte* to) {
  if (!from.empty()) {
    std::memcpy(to, from.data(), from.size());
  }
}

at::Tensor plan_copy_of(std::span<const std::byte> bytes) {
  const auto copy = c10d_new_bytes(bytes.size());
  plan_copy(bytes, c10d_bytes_of(copy).data());
  return copy;
}

/// c10d knows no constant tensors.
at::Tensor plan_input_over(std::span<const std::byte> bytes) {
  return c10d_tensor_over({const_cast<std::byte*>(bytes.data()), bytes.size()});
}

/// Reduces equal contributions that lie one after the other.
void reduce_received(
    const Call& call,
    const at::Tensor& received,
    int size,
    std::span<std::byte> output) {
  std::vector<const std::byte*> contributions;
  for (size_t r = 0; r < static_cast<size_t>(size); ++r) {
    contributions.push_back(c10d_bytes_of(received).data() + r * output.size());
  }
  reduce(
      *call.op,
      *call.dtype,
      contributions,
      output.data(),
      std::ssize(output) / size_of(*call.dtype));
}

std::span<std::byte> plan_slice(const at::Tensor& whole, int rank, int size) {
  const auto bytes = c10d_bytes_of(whole);
  const size_t slice = bytes.size() / static_cast<size_t>(size);
  return bytes.subspan(static_cast<size_t>(rank) * slice, slice);
}

// A block: the length of the text, and as much of it as there is room for.
constexpr size_t kExchangeRoom = kExchangeBlock - sizeof(uint64_t);

void put_block(std::string_view text, std::span<std::byte> block) {
  const uint64_t length = text.size();
  std::memcpy(block.data(), &length, sizeof(length));
  std::memcpy(
      block.data() + sizeof(length),
      text.data(),
      std::min(text.size(), block.size() - sizeof(length)));
}

uint64_t length_in(std::span<const std::byte> block) {
  uint64_t length = 0;
  std::memcpy(&length, block.data(), sizeof(length));
  return length;
}

std::string text_in(std::span<const std::byte> block) {
  const auto text = block.subspan(sizeof(uint64_t));
  return {
      reinterpret_cast<const char*>(text.data()),
      std::min<size_t>(length_in(block), text.size())};
}

/// The second round of an exchange; undefined where all texts had room.
at::Tensor gather_what_had_no_room(
    std::string_view text,
    const at::Tensor& blocks,
    C10dTransport& transport,
    C10dWorks& works) {
  uint64_t longest = kExchangeRoom;
  for (int r = 0; r < transport.size(); ++r) {
    longest =
        std::max(longest, length_in(plan_slice(blocks, r, transport.size())));
  }
  if (longest == kExchangeRoom) {
    return {};
  }
  const size_t room = sizeof(uint64_t) + longest - kExchangeRoom;
  auto rests = c10d_new_bytes(room * static_cast<size_t>(transport.size()));
  put_block(
      text.substr(std::min<size_t>(text.size(), kExchangeRoom)),
      plan_slice(rests, transport.rank(), transport.size()));
  transport.gather(rests, works);
  return rests;
}

} // namespace

at::Tensor C10dBuffers::take(size_t bytes) {
  for (auto each = free_.rbegin(); each != free_.rend(); ++each) {
    if (each->numel() == static_cast<int64_t>(bytes)) {
      at::Tensor buffer = std::move(*each);
      free_.erase(std::next(each).base());
      return buffer;
    }
  }
  return c10d_new_bytes(bytes);
}

void C10dBuffers::give_back(at::Tensor buffer) {
  constexpr int64_t kWorthKeeping = 1 << 20;
  constexpr size_t kMost = 2; // of one in use and the next
  if (buffer.numel() >= kWorthKeeping) {
    free_.push_back(std::move(buffer));
    if (free_.size() > kMost) {
      free_.erase(free_.begin());
    }
  }
}

C10dPlanner::C10dPlanner(int rank, int size, bool may_borrow)
    : rank_(rank),
      size_(size),
      may_borrow_(may_borrow) {
}

bool C10dPlanner::borrows(size_t bytes) const {
  return may_borrow_ && bytes > kCopiedBytes;
}

std::vector<int64_t> C10dPlanner::even_cuts(
    int64_t numel,
    int64_t element_bytes) const {
  std::vector<int64_t> cuts;
  for (int64_t r = 0; r <= size_; ++r) {
    cuts.push_back(numel * r / size_ * element_bytes);
  }
  return cuts;
}

C10dPlan C10dPlanner::token(Call call) {
  C10dPlan plan{.call = std::move(call)};
  if (size_ > 1) {
    const auto tokens = c10d_new_bytes(static_cast<size_t>(size_));
    plan_slice(tokens, rank_, size_)[0] = std::byte{1};
    plan.steps = {[tokens](C10dTransport& transport, C10dWorks& works) {
      transport.gather(tokens, works);
    }};
  }
  return plan;
}

C10dPlan C10dPlanner::barrier(Call call) {
  return token(std::move(call));
}

C10dPlan C10dPlanner::all_gather(Call call, std::span<std::byte> buffer) {
  constexpr int kMostDirect = 16; // ranks: each exchange is with one peer
  if (size_ == 1 || buffer.empty()) {
    return token(std::move(call));
  }
  C10dPlan plan{.call = std::move(call), .borrows = borrows(buffer.size())};
  if (plan.borrows) {
    const auto whole = c10d_tensor_over(buffer);
    const auto cuts = even_cuts(size_, std::ssize(buffer) / size_);
    plan.steps = {[=](C10dTransport& transport, C10dWorks& works) {
      if (transport.size() <= kMostDirect) {
        transport.gather_parts(whole, cuts, works);
      } else {
        transport.gather(whole, works);
      }
    }};
    return plan;
  }
  const auto whole = plan_copy_of(buffer);
  plan.steps = {[whole](C10dTransport& transport, C10dWorks& works) {
    transport.gather(whole, works);
  }};
  plan.deliver = [whole, buffer] {
    plan_copy(c10d_bytes_of(whole), buffer.data());
  };
  return plan;
}

C10dPlan C10dPlanner::reduce_scatter(
    Call call,
    std::span<const std::byte> input,
    std::span<std::byte> output) {
  if (size_ == 1) {
    C10dPlan plan{.call = std::move(call)};
    plan.deliver = [=] { plan_copy(input, output.data()); };
    return plan;
  }
  if (input.empty()) {
    return token(std::move(call));
  }
  C10dPlan plan{.call = call, .borrows = borrows(input.size())};
  const auto sent = plan.borrows ? plan_input_over(input) : plan_copy_of(input);
  const auto received =
      buffers_->take(static_cast<size_t>(size_) * output.size());
  std::vector<int64_t> cuts = call.cuts;
  for (int64_t& cut : cuts) {
    cut *= size_of(*call.dtype);
  }
  plan.steps = {[=](C10dTransport& transport, C10dWorks& works) {
    transport.scatter_parts(sent, cuts, received, works);
  }};
  plan.deliver = [=, size = size_, buffers = buffers_] {
    reduce_received(call, received, size, output);
    buffers->give_back(received);
  };
  return plan;
}

C10dPlan C10dPlanner::all_reduce(Call call, std::span<std::byte> buffer) {
  if (size_ == 1 || buffer.empty()) {
    return token(std::move(call));
  }
  if (buffer.size() * static_cast<size_t>(size_) <= kCopiedBytes) {
    return all_reduce_by_gather(std::move(call), buffer);
  }
  C10dPlan plan{.call = call, .borrows = borrows(buffer.size())};
  const auto data =
      plan.borrows ? c10d_tensor_over(buffer) : plan_copy_of(buffer);
  const int64_t element = size_of(*call.dtype);
  const auto cuts = even_cuts(std::ssize(buffer) / element, element);
  const auto first = static_cast<size_t>(cuts[static_cast<size_t>(rank_)]);
  const auto last = static_cast<size_t>(cuts[static_cast<size_t>(rank_) + 1]);
  const auto own = c10d_bytes_of(data).subspan(first, last - first);
  const auto received = buffers_->take(static_cast<size_t>(size_) * own.size());
  plan.steps = {
      [=](C10dTransport& transport, C10dWorks& works) {
        transport.scatter_parts(data, cuts, received, works);
      },
      [=](C10dTransport& transport, C10dWorks& works) {
        reduce_received(call, received, transport.size(), own);
        transport.gather_parts(data, cuts, works);
      }};
  plan.deliver = [=, copied = !plan.borrows, buffers = buffers_] {
    if (copied) {
      plan_copy(c10d_bytes_of(data), buffer.data());
    }
    buffers->give_back(received);
  };
  return plan;
}

C10dPlan C10dPlanner::all_reduce_by_gather(
    Call call,
    std::span<std::byte> buffer) {
  C10dPlan plan{.call = call};
  const auto whole = c10d_new_bytes(static_cast<size_t>(size_) * buffer.size());
  plan_copy(buffer, plan_slice(whole, rank_, size_).data());
  plan.steps = {[whole](C10dTransport& transport, C10dWorks& works) {
    transport.gather(whole, works);
  }};
  plan.deliver = [=, call = std::move(call), size = size_] {
    reduce_received(call, whole, size, buffer);
  };
  return plan;
}

C10dPlan C10dPlanner::broadcast(Call call, std::span<std::byte> buffer) {
  if (size_ == 1 || buffer.empty()) {
    return token(std::move(call));
  }
  C10dPlan plan{.call = call, .borrows = borrows(buffer.size())};
  const auto data =
      plan.borrows ? c10d_tensor_over(buffer) : plan_copy_of(buffer);
  plan.steps = {
      [data, root = *call.root](C10dTransport& transport, C10dWorks& works) {
        transport.broadcast(data, root, works);
      }};
  if (!plan.borrows) {
    plan.deliver = [=] { plan_copy(c10d_bytes_of(data), buffer.data()); };
  }
  return plan;
}

C10dPlan C10dPlanner::exchange(
    Call call,
    std::string_view mine,
    std::shared_ptr<std::vector<std::string>> texts) {
  C10dPlan plan{.call = std::move(call)};
  const auto blocks =
      c10d_new_bytes(static_cast<size_t>(size_) * kExchangeBlock);
  put_block(mine, plan_slice(blocks, rank_, size_));
  const auto rests = std::make_shared<at::Tensor>(); // what had no room
  const auto gather_blocks = [=](C10dTransport& transport, C10dWorks& works) {
    transport.gather(blocks, works);
  };
  const auto gather_rests = [=, text = std::string(mine)](
                                C10dTransport& transport, C10dWorks& works) {
    *rests = gather_what_had_no_room(text, blocks, transport, works);
  };
  if (size_ > 1) {
    plan.steps = {gather_blocks, gather_rests};
  }
  plan.deliver = [=, size = size_, text = std::string(mine)] {
    texts->clear();
    for (int r = 0; r < size; ++r) {
      texts->push_back(text_in(plan_slice(blocks, r, size)));
      if (rests->defined()) {
        texts->back() += text_in(plan_slice(*rests, r, size));
      }
    }
    texts->front() = size == 1 ? text : texts->front();
  };
  return plan;
}

// The comparison itself must meet the others', whatever they call.
void C10dPlanner::compare_first(C10dPlan& plan, const std::string& shown) {
  if (size_ == 1) {
    return;
  }
  Call mine = plan.call;
  mine.what = shown;
  const uint64_t hash = hash_of(mine);
  mine = shortened(mine);
  const std::string text = std::to_string(hash) + " " + encode_call(mine);
  const auto blocks =
      c10d_new_bytes(static_cast<size_t>(size_) * 2 * kShortCallBytes);
  put_block(text, plan_slice(blocks, rank_, size_));
  const auto gather = [blocks](C10dTransport& transport, C10dWorks& works) {
    transport.enter(0);
    transport.gather(blocks, works);
  };
  const auto compare = [=](C10dTransport& transport, C10dWorks&) {
    for (int r = 0; r < transport.size(); ++r) {
      const auto theirs = text_in(plan_slice(blocks, r, transport.size()));
      if (theirs != text) {
        const auto call =
            decode_call(std::string_view(theirs).substr(theirs.find(' ') + 1));
        throw C10dMismatch(
            difference_of(mine, transport.rank(), call, r, transport.size()));
      }
    }
  };
  plan.steps.insert(plan.steps.begin(), {gather, compare});
}

} // namespace fsdp::detail
