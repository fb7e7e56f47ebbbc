#pragma once

#include "launch/settings.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::detail {

/// Who asks for a store, and how long it waits.
struct StoreUser {
  int rank = 0;
  int size = 1;
  bool serves = false; // opens the TCP port
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

/// Throws CommunicationError when nobody answers at `address`.
c10::intrusive_ptr<c10d::Store> open_store(
    const StoreAddress& address,
    const StoreUser& user);

/// Where ranks that share no communicator yet tell each other short texts.
class C10dRendezvous {
 public:
  /// `job` is the same on all ranks, and in no other use of the store. Throws
  /// CommunicationError when more ranks come than there are: then an earlier
  /// job has left the store behind.
  C10dRendezvous(
      const StoreAddress& address,
      const c10::intrusive_ptr<c10d::Store>& store,
      const StoreUser& user,
      const std::string& job);

  /// Hands every rank the texts of all, by rank. Throws CommunicationError that
  /// names the ranks that do not come within `limit`. Collective.
  std::vector<std::string> exchange(
      const std::string& mine,
      const std::string& what,
      std::chrono::milliseconds limit);

  /// For a process group of these ranks.
  c10::intrusive_ptr<c10d::Store> store_of_group() const;

 private:
  std::string get(const std::string& key);
  [[noreturn]] void throw_lost(
      const std::string& who,
      const std::exception& error) const;
  [[noreturn]] void throw_missing(
      const std::string& prefix,
      const std::string& what,
      std::chrono::milliseconds limit,
      int waited_for);

  std::string address_;
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int size_;
  uint64_t exchanges_ = 0;
};

} // namespace fsdp::detail
