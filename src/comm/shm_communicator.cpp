#include "comm/shm_communicator.h"

#include "comm/pieces.h"
#include "comm/reduce.h"
#include "comm/shm_group.h"
#include "comm/shm_place.h"
#include "comm/shm_reduction.h"
#include "comm/shm_slices.h"
#include "comm/shm_work.h"
#include "comm/split_group.h"

#include <exception>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

namespace fsdp::detail {
namespace {

/// Larger buffers are reduced part by part, each by one rank.
constexpr size_t kLargestFlatReduction = size_t{32} << 10;

/// A copy of what is to be contributed, for when its owner goes away.
std::function<ShmContribution()> copy_of(const ShmContribution& contribution) {
  const auto copy = std::make_shared<std::vector<std::byte>>(contribution.size);
  copy_pieces(copy->data(), contribution.pieces, 0, contribution.size);
  return [copy, contribution] {
    auto result = contribution;
    result.pieces = {{0, *copy}};
    return result;
  };
}

class ShmCommunicator : public Communicator {
 public:
  explicit ShmCommunicator(std::shared_ptr<ShmPlace> place)
      : place_(std::move(place)),
        group_(*place_->group()) {}

  ~ShmCommunicator() override {
    group_.leave(
        std::uncaught_exceptions() > 0 ? ShmGone::kGoneByException
                                       : ShmGone::kGone);
  }

  ShmCommunicator(const ShmCommunicator&) = delete;
  ShmCommunicator& operator=(const ShmCommunicator&) = delete;

  int rank() const override { return group_.rank(); }

  int size() const override { return group_.size(); }

  std::chrono::milliseconds timeout() const override {
    return group_.host()->timeout();
  }

  std::unique_ptr<Work> all_gather(
      std::span<std::byte> buffer,
      std::string what) override;

  std::unique_ptr<Work> reduce_scatter(
      std::span<const std::byte> input,
      std::span<std::byte> output,
      DType dtype,
      std::span<const int64_t> cuts,
      std::string what,
      ReduceOp op) override;

  std::unique_ptr<Work> reduce_scatter_pieces(
      std::vector<Piece> input,
      std::span<std::byte> output,
      DType dtype,
      std::span<const int64_t> cuts,
      std::string what,
      ReduceOp op) override;

  std::unique_ptr<Work> all_reduce(
      std::span<std::byte> buffer,
      DType dtype,
      ReduceOp op,
      std::string what) override;

  std::unique_ptr<Work> all_reduce_pieces(
      std::vector<Piece> input,
      std::span<std::byte> output,
      DType dtype,
      ReduceOp op,
      std::string what) override;

  std::unique_ptr<Work>
  broadcast(std::span<std::byte> buffer, int root, std::string what) override;

  void barrier(std::string what) override;

  std::vector<std::string> exchange(std::string_view mine, std::string what)
      override;

  uint64_t epoch() const override { return group_.epoch(); }

  void signal_failure(std::string_view message) override {
    place_->end_epoch(
        rank_text(rank(), size()) + " failed: " + std::string(message));
  }

  std::shared_ptr<Communicator> split(int color, int key) override;

  std::string aborted() const override { return group_.host()->aborted(); }

  void reserve(int64_t bytes) override;

  std::shared_ptr<SharedSlices> share_slices(
      std::span<const int64_t> slice_bytes) override;

 private:
  size_t own() const { return static_cast<size_t>(rank()); }
  size_t ranks() const { return static_cast<size_t>(size()); }

  std::unique_ptr<Work> start(ShmOperation operation);
  std::unique_ptr<Work> reduce_flat(std::span<std::byte> buffer, Call call);
  std::unique_ptr<Work> start_reduction(
      Call call,
      std::vector<Piece> input,
      std::span<std::byte> output);
  std::unique_ptr<Work> reduce_by_parts(
      std::vector<Piece> input,
      std::span<std::byte> output,
      Call call);
  std::vector<std::string> exchange_bytes(std::string_view mine, Call call);
  void fail_together(const std::string& error, const std::string& what);
  /// Address space for this rank and others, which their `leader` takes.
  size_t allocate_together(int leader, size_t bytes, const std::string& what);

  std::shared_ptr<ShmPlace> place_;
  ShmGroup& group_;
};

std::unique_ptr<Work> ShmCommunicator::start(ShmOperation operation) {
  auto made = group_.issue(std::move(operation));
  return std::make_unique<ShmWork>(place_->group(), made, [made] {
    made->deliver = nullptr;
    if (!made->contributed) {
      made->contribution = copy_of(made->contribution());
    }
  });
}

std::unique_ptr<Work> ShmCommunicator::all_gather(
    std::span<std::byte> buffer,
    std::string what) {
  const size_t slice = buffer.size() / ranks();
  const auto stores = stores_for(buffer.size() * 2 * ranks());
  ShmOperation operation{
      .call = all_gather_call(std::ssize(buffer), size(), std::move(what)),
      .contribution = [mine = buffer.subspan(own() * slice, slice),
                       stores] { return contribution_of(mine, stores); },
      .deliver =
          [buffer, slice, me = own(), stores](const ShmPayloads& payloads) {
            for (size_t r = 0; r < payloads.size(); ++r) {
              if (r != me) {
                copy_bytes(
                    buffer.data() + r * slice,
                    payloads[r].data(),
                    slice,
                    stores);
              }
            }
          }};
  return start(std::move(operation));
}

std::unique_ptr<Work> ShmCommunicator::reduce_scatter(
    std::span<const std::byte> input,
    std::span<std::byte> output,
    DType dtype,
    std::span<const int64_t> cuts,
    std::string what,
    ReduceOp op) {
  Call call = reduce_scatter_call(
      std::ssize(input), dtype, cuts, size(), std::move(what), op);
  return start_reduction(std::move(call), {{0, input}}, output);
}

std::unique_ptr<Work> ShmCommunicator::reduce_scatter_pieces(
    std::vector<Piece> input,
    std::span<std::byte> output,
    DType dtype,
    std::span<const int64_t> cuts,
    std::string what,
    ReduceOp op) {
  Call call = reduce_scatter_call(
      cuts.empty() ? 0 : cuts.back() * size_of(dtype),
      dtype,
      cuts,
      size(),
      std::move(what),
      op);
  check_pieces(input, call.bytes, size_of(dtype), call.what);
  return start_reduction(std::move(call), std::move(input), output);
}

std::unique_ptr<Work> ShmCommunicator::start_reduction(
    Call call,
    std::vector<Piece> input,
    std::span<std::byte> output) {
  check_output(call, rank(), std::ssize(output));
  const auto reduction = std::make_shared<ShmReduction>(
      ShmReduction{call, call.cuts, std::move(input), own()});
  return start(
      {.call = std::move(call),
       .contribution = [reduction] { return reduction->contribution(); },
       .deliver =
           [reduction, output](const ShmPayloads& payloads) {
             reduction->deliver(payloads, output.data());
           }});
}

std::unique_ptr<Work> ShmCommunicator::all_reduce(
    std::span<std::byte> buffer,
    DType dtype,
    ReduceOp op,
    std::string what) {
  Call call = all_reduce_call(std::ssize(buffer), dtype, op, std::move(what));
  return size() == 1 || buffer.size() <= kLargestFlatReduction
      ? reduce_flat(buffer, std::move(call))
      : reduce_by_parts({{0, buffer}}, buffer, std::move(call));
}

std::unique_ptr<Work> ShmCommunicator::all_reduce_pieces(
    std::vector<Piece> input,
    std::span<std::byte> output,
    DType dtype,
    ReduceOp op,
    std::string what) {
  if (size() == 1 || output.size() <= kLargestFlatReduction) {
    return Communicator::all_reduce_pieces(
        std::move(input), output, dtype, op, std::move(what));
  }
  Call call = all_reduce_call(std::ssize(output), dtype, op, std::move(what));
  check_pieces(input, call.bytes, size_of(dtype), call.what);
  return reduce_by_parts(std::move(input), output, std::move(call));
}

std::unique_ptr<Work> ShmCommunicator::reduce_flat(
    std::span<std::byte> buffer,
    Call call) {
  ShmOperation operation{
      .call = call,
      .contribution = [buffer] { return contribution_of(buffer); },
      .deliver =
          [buffer, call](const ShmPayloads& payloads) {
            std::vector<const std::byte*> inputs;
            for (const auto& payload : payloads) {
              inputs.push_back(payload.data());
            }
            reduce(
                *call.op,
                *call.dtype,
                inputs,
                buffer.data(),
                std::ssize(buffer) / size_of(*call.dtype));
          }};
  return start(std::move(operation));
}

std::unique_ptr<Work> ShmCommunicator::reduce_by_parts(
    std::vector<Piece> input,
    std::span<std::byte> output,
    Call call) {
  struct Target {
    ShmReduction reduction;
    std::span<std::byte> output;
    // Where those of the program are gone.
    std::vector<std::byte> input_copy;
    std::vector<std::byte> output_copy;

    std::span<std::byte> part(size_t r) const {
      return output.subspan(
          reduction.cut(r), reduction.cut(r + 1) - reduction.cut(r));
    }
  };
  std::vector<int64_t> cuts;
  const int64_t numel = std::ssize(output) / size_of(*call.dtype);
  for (int64_t r = 0; r <= size(); ++r) {
    cuts.push_back(numel * r / size());
  }
  const size_t me = own();
  const auto target = std::make_shared<Target>(
      Target{{call, std::move(cuts), std::move(input), me}, output, {}, {}});
  group_.issue(
      {.call = call,
       .contribution = [target] { return target->reduction.contribution(); },
       .deliver =
           [target, me](const ShmPayloads& payloads) {
             target->reduction.deliver(payloads, target->part(me).data());
           }});
  const auto gather = group_.issue(
      {.call = std::move(call),
       .contribution =
           [target, me, stores = stores_for(output.size() * 2 * ranks())] {
             return contribution_of(target->part(me), stores);
           },
       .deliver =
           [target, me](const ShmPayloads& payloads) {
             for (size_t r = 0; r < payloads.size(); ++r) {
               if (r != me) {
                 copy_bytes(
                     target->part(r).data(),
                     payloads[r].data(),
                     payloads[r].size());
               }
             }
           },
       .follows = true});
  return std::make_unique<ShmWork>(place_->group(), gather, [target, gather] {
    gather->deliver = nullptr;
    if (!gather->contributed) {
      auto& [reduction, output_now, input_copy, output_copy] = *target;
      input_copy.resize(output_now.size());
      copy_pieces(input_copy.data(), reduction.input, 0, input_copy.size());
      reduction.input = {{0, input_copy}};
      output_copy.assign(output_now.begin(), output_now.end());
      output_now = output_copy;
    }
  });
}

std::unique_ptr<Work> ShmCommunicator::broadcast(
    std::span<std::byte> buffer,
    int root,
    std::string what) {
  const bool is_root = root == rank();
  ShmOperation operation{
      .call = broadcast_call(std::ssize(buffer), root, size(), std::move(what)),
      .contribution =
          [buffer, is_root] {
            return contribution_of(is_root ? buffer : std::span<std::byte>());
          },
      .deliver =
          [buffer, root, is_root](const ShmPayloads& payloads) {
            if (!is_root) {
              copy_bytes(
                  buffer.data(),
                  payloads[static_cast<size_t>(root)].data(),
                  buffer.size());
            }
          }};
  return start(std::move(operation));
}

std::vector<std::string> ShmCommunicator::exchange_bytes(
    std::string_view mine,
    Call call) {
  std::vector<std::string> all;
  ShmOperation operation{
      .call = std::move(call),
      .contribution =
          [mine] { return contribution_of(std::as_bytes(std::span(mine))); },
      .deliver =
          [&all](const ShmPayloads& payloads) {
            for (const auto& payload : payloads) {
              all.emplace_back(
                  reinterpret_cast<const char*>(payload.data()),
                  payload.size());
            }
          }};
  start(std::move(operation))->wait();
  return all;
}

void ShmCommunicator::barrier(std::string what) {
  exchange_bytes({}, Call{.kind = CallKind::kBarrier, .what = std::move(what)});
}

std::vector<std::string> ShmCommunicator::exchange(
    std::string_view mine,
    std::string what) {
  return exchange_bytes(
      mine, Call{.kind = CallKind::kExchange, .what = std::move(what)});
}

// Memory.

void ShmCommunicator::fail_together(
    const std::string& error,
    const std::string& what) {
  const auto errors = exchange(error, what);
  for (size_t r = 0; r < errors.size(); ++r) {
    if (!errors[r].empty()) {
      throw CommunicationError(
          rank_text(static_cast<int>(r), size()) + ": " + errors[r]);
    }
  }
}

size_t ShmCommunicator::allocate_together(
    int leader,
    size_t bytes,
    const std::string& what) {
  std::string offset;
  std::string error;
  if (rank() == leader) {
    try {
      offset = std::to_string(group_.host()->allocate(bytes));
    } catch (const CommunicationError& caught) {
      error = caught.what();
    }
  }
  fail_together(error, what);
  return std::stoull(exchange(offset, what)[static_cast<size_t>(leader)]);
}

void ShmCommunicator::reserve(int64_t bytes) {
  std::string error;
  try {
    group_.reserve(static_cast<size_t>(bytes));
  } catch (const CommunicationError& caught) {
    error = caught.what();
  }
  fail_together(error, "memory for contributions");
}

std::shared_ptr<SharedSlices> ShmCommunicator::share_slices(
    std::span<const int64_t> slice_bytes) {
  const std::string what = "memory for shared slices";
  exchange_bytes( // ends all ranks where sizes differ
      {},
      Call{
          .kind = CallKind::kExchange,
          .what = what,
          .cuts = {slice_bytes.begin(), slice_bytes.end()}});
  const size_t offset =
      allocate_together(0, ShmSlices::bytes_for(slice_bytes, size()), what);
  auto slices =
      std::make_shared<ShmSlices>(place_->group(), offset, slice_bytes);
  std::string error;
  try {
    slices->reserve();
  } catch (const CommunicationError& caught) {
    error = caught.what();
  }
  fail_together(error, what);
  return slices;
}

// Groups.

std::shared_ptr<Communicator> ShmCommunicator::split(int color, int key) {
  const auto chosen = group_of_split(
      exchange_bytes(
          encode_split(color, key),
          Call{.kind = CallKind::kSplit, .what = "split"}),
      rank());
  std::vector<int> members;
  for (const int r : chosen.ranks) {
    members.push_back(group_.members()[static_cast<size_t>(r)]);
  }
  const size_t control = allocate_together(
      chosen.ranks.front(),
      ShmGroup::control_bytes(static_cast<int>(members.size())),
      "split");
  auto place = std::make_shared<ShmPlace>(std::make_shared<ShmGroup>(
      group_.host(), control, std::move(members), chosen.position));
  place_->add_child(place);
  return std::make_shared<ShmCommunicator>(std::move(place));
}

} // namespace

std::shared_ptr<Communicator> make_shm_communicator(
    std::shared_ptr<ShmSegment> segment,
    std::chrono::milliseconds timeout) {
  const int rank = segment->rank();
  std::vector<int> members(static_cast<size_t>(segment->size()));
  std::iota(members.begin(), members.end(), 0);
  auto host = std::make_shared<ShmHost>(
      std::move(segment),
      timeout,
      ShmGroup::control_bytes(static_cast<int>(members.size())));
  const size_t control = host->first_offset();
  return std::make_shared<ShmCommunicator>(
      std::make_shared<ShmPlace>(std::make_shared<ShmGroup>(
          std::move(host), control, std::move(members), rank)));
}

} // namespace fsdp::detail
