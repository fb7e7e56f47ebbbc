#include <fsdp/c10d.h>

#include "api/world_state.h"
#include "comm/c10d_communicator.h"
#include "launch/host.h"
#include "runtime/errors.h"

#include <utility>

namespace fsdp {

namespace {

World world_over(detail::C10dWorldOptions options) {
  TORCH_CHECK_VALUE(
      options.size >= 1 && options.rank >= 0 && options.rank < options.size,
      "world_over: expected a rank from 0 to size - 1, but got rank ",
      options.rank,
      " of ",
      options.size,
      ".");
  TORCH_CHECK_VALUE(
      options.timeout.count() > 0,
      "world_over: expected a positive time limit, but got ",
      options.timeout.count(),
      " ms.");
  return detail::communicate([&] {
    auto communicator = detail::make_c10d_communicator(std::move(options));
    const auto hosts =
        communicator->exchange(detail::host_identity(), "hosts of the ranks");
    auto placement = detail::place_among(hosts, communicator->rank());
    return detail::WorldState::make_world(
        std::move(communicator), std::move(placement));
  });
}

} // namespace

World world_over(
    C10dBackendFactory factory,
    c10::intrusive_ptr<c10d::Store> store,
    int rank,
    int size,
    C10dOptions options) {
  TORCH_CHECK_VALUE(
      factory != nullptr,
      "world_over: the factory is empty. Pass a function that makes a"
      " c10d::Backend.");
  TORCH_CHECK_VALUE(
      store != nullptr,
      "world_over: the store is null. Back ends that a factory makes meet"
      " through a store, for instance a c10d::TCPStore.");
  return world_over(
      {.factory = std::move(factory),
       .store = std::move(store),
       .rank = rank,
       .size = size,
       .timeout = options.timeout,
       .compare_calls = options.compare_calls});
}

World world_over(
    c10::intrusive_ptr<c10d::Backend> backend,
    c10::intrusive_ptr<c10d::Store> store,
    C10dOptions options) {
  TORCH_CHECK_VALUE(
      backend != nullptr,
      "world_over: the back end is null. Pass one, or a factory.");
  const int rank = backend->getRank();
  const int size = backend->getSize();
  return world_over(
      {.factory = {},
       .backend = std::move(backend),
       .store = std::move(store),
       .rank = rank,
       .size = size,
       .timeout = options.timeout,
       .compare_calls = options.compare_calls});
}

} // namespace fsdp
