#include "comm/gloo_communicator.h"

#include "comm/c10d_communicator.h"
#include "comm/gloo_backend.h"

#include <utility>

namespace fsdp::detail {

std::shared_ptr<Communicator> make_gloo_communicator(
    c10::intrusive_ptr<c10d::Store> store,
    int rank,
    int size,
    std::chrono::milliseconds timeout,
    GlooInterface interface,
    CompareCalls compare_calls) {
  return make_c10d_communicator(
      {.factory = gloo_factory(timeout, interface),
       .store = std::move(store),
       .rank = rank,
       .size = size,
       .timeout = timeout,
       .compare_calls = compare_calls == CompareCalls::kYes,
       .is_tagged = true});
}

} // namespace fsdp::detail
