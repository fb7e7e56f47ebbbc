#include "comm/c10d_rendezvous.h"

#include "comm/c10d_backend.h"
#include "comm/call.h"
#include "comm/sigpipe_block.h"
#include "comm/socket_limits.h"

#include <fsdp/communicator.h>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <exception>

namespace fsdp::detail {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

std::string seconds_text(milliseconds time) {
  auto text = std::to_string(static_cast<double>(time.count()) / 1000.0);
  text.erase(text.find_last_not_of('0') + 1);
  return (text.back() == '.' ? text.substr(0, text.size() - 1) : text) + " s";
}

std::string first_line(const std::exception& error) {
  const auto text = c10d_text_of(error);
  return text.substr(0, text.find('\n'));
}

c10::intrusive_ptr<c10d::Store> make_store(
    const StoreAddress& address,
    const StoreUser& user) {
  if (!address.path.empty()) {
    return c10::make_intrusive<c10d::FileStore>(address.path, user.size);
  }
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(address.port);
  options.isServer = user.serves;
  options.numWorkers = static_cast<size_t>(user.size);
  options.waitWorkers = false;
  options.timeout = user.timeout;
  // The server's thread may answer a client that has gone.
  const SigpipeBlock block;
  const ConnectionDeadline deadline(address.port, user.timeout);
  auto store = c10::make_intrusive<c10d::TCPStore>(address.host, options);
  // An answer takes microseconds; what waits for a key does so before it reads.
  constexpr milliseconds kLongestAnswer(5000);
  limit_connections_to(
      address.port,
      std::clamp(user.timeout / 2, milliseconds(100), kLongestAnswer));
  return store;
}

} // namespace

c10::intrusive_ptr<c10d::Store> open_store(
    const StoreAddress& address,
    const StoreUser& user) {
  try {
    auto store = make_store(address, user);
    store->setTimeout(user.timeout);
    return store;
  } catch (const std::exception& error) {
    const auto reason = !address.path.empty() ? "can not use the file"
        : user.serves
        ? "can not open the port"
        : "no answer from rank 0 within " + seconds_text(user.timeout);
    throw CommunicationError(
        rank_text(user.rank, user.size) + ": store at " + address.text() +
        ": " + reason + ". libtorch says: " + first_line(error));
  }
}

C10dRendezvous::C10dRendezvous(
    const StoreAddress& address,
    const c10::intrusive_ptr<c10d::Store>& store,
    const StoreUser& user,
    const std::string& job)
    : address_(address.text()),
      store_(c10::make_intrusive<c10d::PrefixStore>("fsdp/" + job, store)),
      rank_(user.rank),
      size_(user.size) {
  int64_t joined = 0;
  try {
    joined = store_->add("joined", 1);
  } catch (const c10::Error& error) {
    throw_lost(rank_text(rank_, size_) + ": start of the ranks: ", error);
  }
  if (joined > size_) {
    throw CommunicationError(
        rank_text(rank_, size_) + ": store at " + address_ + ": more than " +
        std::to_string(size_) +
        " processes have come: an earlier job has left it behind, or another"
        " job uses it too. Use a new file or port.");
  }
}

std::string C10dRendezvous::get(const std::string& key) {
  const auto bytes = store_->get(key);
  return {bytes.begin(), bytes.end()};
}

std::vector<std::string> C10dRendezvous::exchange(
    const std::string& mine,
    const std::string& what,
    milliseconds limit) {
  const auto prefix = std::to_string(exchanges_++) + "/";
  const auto deadline = Clock::now() + limit;
  std::vector<std::string> texts;
  int rank = 0; // for which it waits
  try {
    store_->set(
        prefix + std::to_string(rank_),
        std::vector<uint8_t>(mine.begin(), mine.end()));
    for (; rank < size_; ++rank) {
      const auto key = prefix + std::to_string(rank);
      const auto left =
          std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
      store_->wait({key}, std::max(left, milliseconds(1)));
      texts.push_back(get(key));
    }
  } catch (const c10::Error&) {
    throw_missing(prefix, what, limit, rank);
  }
  return texts;
}

void C10dRendezvous::throw_lost(
    const std::string& who,
    const std::exception& error) const {
  throw CommunicationError(
      who + "lost the store at " + address_ +
      ": did rank 0 end? libtorch says: " + first_line(error));
}

void C10dRendezvous::throw_missing(
    const std::string& prefix,
    const std::string& what,
    milliseconds limit,
    int waited_for) {
  const auto who = rank_text(rank_, size_) + ": " + what + ": ";
  std::string missing;
  try {
    for (int rank = 0; rank < size_; ++rank) {
      const auto text = std::to_string(rank);
      missing += store_->check({prefix + text}) ? "" : " " + text;
    }
  } catch (const std::exception& error) {
    // Rank 0 may have ended because that rank did not come.
    throw_lost(
        who + "waited for rank " + std::to_string(waited_for) + " and ", error);
  }
  throw CommunicationError(
      who + "waited " + seconds_text(limit) + " at " + address_ +
      " for ranks that did not come:" + missing +
      ". Were they started, and with the same variables?");
}

c10::intrusive_ptr<c10d::Store> C10dRendezvous::store_of_group() const {
  return c10::make_intrusive<c10d::PrefixStore>("group", store_);
}

} // namespace fsdp::detail
