#include "api/join.h"

#include "comm/c10d_rendezvous.h"
#include "comm/gloo_communicator.h"
#include "comm/shm_communicator.h"
#include "comm/shm_segment.h"
#include "comm/single_communicator.h"
#include "launch/host.h"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <random>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace fsdp::detail {

namespace {

using std::chrono::milliseconds;

/// Once one rank has failed, the others come soon.
constexpr milliseconds kFallbackLimit(10'000);

std::string hexadecimal(uint64_t number) {
  std::ostringstream text;
  text << std::hex << number;
  return text.str();
}

std::string random_token() {
  std::random_device random;
  return hexadecimal((uint64_t{random()} << 32) | random());
}

bool all_equal(const std::vector<std::string>& texts) {
  return std::all_of(texts.begin(), texts.end(), [&](const auto& text) {
    return text == texts.front();
  });
}

/// One attempt to join a job.
class Joining {
 public:
  explicit Joining(const StartUp& start)
      : start_(start),
        environment_(start.environment) {}

  Joined run();

 private:
  bool wants(Backend backend) const { return start_.backend == backend; }
  void open_rendezvous(milliseconds timeout);
  void find_out_about_host();
  std::string name_of_job() const;
  Joined join_by_shm() const;
  Joined join_by_gloo() const;
  Joined fall_back(const std::string& failure);

  const StartUp& start_;
  const Environment& environment_;
  std::optional<C10dRendezvous> rendezvous_;
  bool on_one_host_ = false;
  std::string token_; // of rank 0, once the ranks have met
};

/// The store stays open while the process lives: when another world is made, a
/// rank that is quicker than rank 0 must not find one that is about to close.
c10::intrusive_ptr<c10d::Store> store_of_process(
    const StoreAddress& address,
    const StoreUser& user) {
  static std::mutex mutex;
  static std::string opened;
  static c10::intrusive_ptr<c10d::Store> store;
  const std::lock_guard lock(mutex);
  if (!store || opened != address.text()) {
    store = open_store(address, user);
    opened = address.text();
  }
  return store;
}

void Joining::open_rendezvous(milliseconds timeout) {
  const auto& address = environment_.store;
  if (!address.has_value()) {
    throw std::invalid_argument("fsdp: " + missing_store_text(environment_));
  }
  StoreUser user;
  user.rank = environment_.rank;
  user.size = environment_.size;
  user.serves = user.rank == 0 && !environment_.store_is_served;
  user.timeout = timeout;
  rendezvous_.emplace(
      *address,
      store_of_process(*address, user),
      user,
      environment_.job + "/" + std::to_string(start_.attempt));
}

/// The ranks tell each other where they run, unless the launcher has said that
/// all are here.
void Joining::find_out_about_host() {
  on_one_host_ = environment_.on_one_host();
  if (on_one_host_ && !wants(Backend::kGloo)) {
    return;
  }
  open_rendezvous(start_.timeout);
  const auto hosts = rendezvous_->exchange(
      host_identity(), "hosts of the ranks", start_.timeout);
  token_ =
      rendezvous_->exchange(random_token(), "name of the job", start_.timeout)
          .front();
  on_one_host_ = all_equal(hosts);
}

/// No two jobs of a host have the same, and no two worlds of a job.
std::string Joining::name_of_job() const {
  if (!token_.empty()) {
    return token_;
  }
  const auto store = environment_.store.value_or(StoreAddress()).text();
  std::string job = environment_.job + "|" + store;
  const bool launcher_names_none = environment_.job.empty() &&
      (environment_.launcher != Launcher::kVariables ||
       !environment_.store.has_value());
  if (launcher_names_none) {
    job += "|" + launcher_process(environment_.rank_variable);
  }
  job +=
      "|" + std::to_string(::getuid()) + "|" + std::to_string(start_.attempt);
  uint64_t hash = 1469598103934665603U; // FNV-1a
  for (const char c : job) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211U;
  }
  return hexadecimal(hash);
}

Joined Joining::join_by_shm() const {
  ShmAddress address;
  address.name = name_of_job();
  address.rank = environment_.rank;
  address.size = environment_.size;
  address.timeout = start_.timeout;
  Joined joined;
  joined.backend = Backend::kShm;
  joined.communicator =
      make_shm_communicator(ShmSegment::join(address), start_.timeout);
  // Shows that it works for all: a rank that has failed by now leaves.
  joined.hosts =
      joined.communicator->exchange(host_identity(), "hosts of the ranks");
  return joined;
}

Joined Joining::join_by_gloo() const {
  Joined joined;
  joined.backend = Backend::kGloo;
  joined.communicator = make_gloo_communicator(
      rendezvous_->store_of_group(),
      environment_.rank,
      environment_.size,
      start_.timeout,
      on_one_host_ ? GlooInterface::kLoopback : GlooInterface::kDefault,
      start_.debug ? CompareCalls::kYes : CompareCalls::kNo);
  joined.hosts =
      joined.communicator->exchange(host_identity(), "hosts of the ranks");
  joined.store = environment_.store->text();
  return joined;
}

/// All ranks come here, or none: either all have shared memory, or each of them
/// learns that it failed.
Joined Joining::fall_back(const std::string& failure) {
  if (!environment_.store.has_value()) {
    throw CommunicationError(
        failure +
        " (Where shared memory can not be used, Gloo can, once MASTER_ADDR and"
        " MASTER_PORT, or LIBFSDP_STORE, are set.)");
  }
  const auto limit = std::min(start_.timeout, kFallbackLimit);
  try {
    if (!rendezvous_.has_value()) {
      open_rendezvous(limit);
    }
    rendezvous_->exchange(failure, "use of Gloo instead of shm", limit);
  } catch (const CommunicationError&) {
    throw CommunicationError(failure); // a rank is missing for shm as well
  }
  auto joined = join_by_gloo();
  joined.no_shm = failure;
  return joined;
}

Joined Joining::run() {
  find_out_about_host();
  if (wants(Backend::kShm) && !on_one_host_) {
    throw std::invalid_argument(
        "fsdp: the back end shm was asked for, but the " +
        std::to_string(environment_.size) +
        " ranks are not all on one host. Use gloo.");
  }
  if (!on_one_host_ || wants(Backend::kGloo)) {
    return join_by_gloo();
  }
  try {
    return join_by_shm();
  } catch (const CommunicationError& error) {
    if (wants(Backend::kShm)) {
      throw;
    }
    return fall_back(error.what());
  }
}

} // namespace

Joined join(const StartUp& start) {
  if (start.environment.size > 1) {
    if (start.backend == Backend::kSingle) {
      throw std::invalid_argument(
          "fsdp: the back end single was asked for, but " +
          name_of(start.environment.launcher) + " has started " +
          std::to_string(start.environment.size) + " ranks.");
    }
    return Joining(start).run();
  }
  Joined joined;
  joined.communicator = make_single_communicator();
  joined.hosts = {host_identity()};
  return joined;
}

} // namespace fsdp::detail
