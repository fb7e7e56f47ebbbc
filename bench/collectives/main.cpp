// One rank of the benchmark of collectives, over the back end that the
// environment names. Started by bench/run.py. Measures:
//   copy_twice      two copies of 32 MB, all ranks at once
//   all_gather      64 MB in private memory
//   copy_and_add    a copy of 32 MB and a sum of 32 MB, all ranks at once
//   reduce_scatter  64 MB to 32 MB, in private memory
//   latency         all_gather of 16 KB: the mean of 100 calls

#include "collectives/plain_copies.h"
#include "common/token_pipe.h"

#include <fsdp/communicator.h>
#include <fsdp/init.h>
#include <fsdp/world.h>

#include <functional>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace bench {
namespace {

constexpr size_t kLargeFloats = (size_t{64} << 20) / sizeof(float);
constexpr size_t kHalf = kLargeFloats / 2;
constexpr size_t kSmallBytes = size_t{16} << 10;
constexpr int kSmallCalls = 100;
constexpr int kWarmUpCalls = 1000;

class Collectives {
 public:
  explicit Collectives(const fsdp::World& world);

  nlohmann::json answer(const Token& token);

 private:
  void copy_twice();
  void all_gather();
  void copy_and_add();
  void reduce_scatter();
  void small_all_gathers(int calls);

  fsdp::World world_;
  std::vector<float> large_;
  std::vector<float> other_; // as large as one rank's part
  std::vector<std::byte> small_;
  std::vector<int64_t> cuts_;
  std::map<std::string, std::function<void()>> measures_;
};

Collectives::Collectives(const fsdp::World& world)
    : world_(world),
      large_(kLargeFloats, 1.0F),
      other_(kHalf, 1.0F),
      small_(kSmallBytes),
      cuts_{0, kHalf, kLargeFloats},
      measures_{
          {"copy_twice", [this] { copy_twice(); }},
          {"all_gather", [this] { all_gather(); }},
          {"copy_and_add", [this] { copy_and_add(); }},
          {"reduce_scatter", [this] { reduce_scatter(); }},
          {"latency", [this] { small_all_gathers(kSmallCalls); }}} {
  if (world.size() != 2) {
    throw std::invalid_argument(
        "expected 2 ranks, but this job has " + std::to_string(world.size()) +
        ".");
  }
  // As a net does when it is made.
  world_.communicator().reserve(kLargeFloats * sizeof(float));
  small_all_gathers(kWarmUpCalls);
}

nlohmann::json Collectives::answer(const Token& token) {
  const auto found = measures_.find(token.measure);
  if (found == measures_.end()) {
    throw std::invalid_argument("unknown measure '" + token.measure + "'.");
  }
  auto answer = seconds_of(
      token.count, [this] { world_.barrier(); }, found->second);
  if (token.measure == "latency") {
    for (auto& seconds : answer["seconds"]) {
      seconds = seconds.get<double>() / kSmallCalls;
    }
  }
  return answer;
}

void Collectives::copy_twice() {
  const std::span<float> all(large_);
  copy(all.first(kHalf), other_);
  copy(other_, all.last(kHalf));
}

void Collectives::all_gather() {
  world_.communicator()
      .all_gather(std::as_writable_bytes(std::span(large_)), "all_gather")
      ->wait();
}

void Collectives::copy_and_add() {
  const std::span<float> all(large_);
  copy(all.first(kHalf), other_);
  add(all.last(kHalf), other_);
}

void Collectives::reduce_scatter() {
  world_.communicator()
      .reduce_scatter(
          std::as_bytes(std::span(large_)),
          std::as_writable_bytes(std::span(other_)),
          fsdp::DType::kFloat32,
          cuts_,
          "reduce_scatter")
      ->wait();
}

void Collectives::small_all_gathers(int calls) {
  for (int i = 0; i < calls; ++i) {
    world_.communicator().all_gather(small_, "small all_gather")->wait();
  }
}

} // namespace
} // namespace bench

int main() {
  return bench::run_program("bench_collectives", [] {
    const auto world = fsdp::init();
    bench::Collectives collectives(world);
    bench::serve(
        [&](const bench::Token& token) { return collectives.answer(token); });
    world.shutdown();
  });
}
