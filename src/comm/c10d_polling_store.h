#pragma once

#include "comm/c10d_backend.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::detail {

/// A view of a store whose waits end when nobody needs them any more, and leave
/// the store free for others meanwhile: a wait of a TCPStore can neither be
/// ended, nor can its connection be used as long as it lasts.
class C10dPollingStore : public c10d::Store {
 public:
  C10dPollingStore(C10dStorePtr inner, std::function<bool()> is_over);

  C10dStorePtr clone() override;

  using Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;

  using Store::compareSet;
  std::vector<uint8_t> compareSet(
      const std::string& key,
      const std::vector<uint8_t>& expected,
      const std::vector<uint8_t>& desired) override;

  /// Waits for the key, as all stores do.
  std::vector<uint8_t> get(const std::string& key) override;

  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;

  /// Throw CommunicationError when it is over, or the keys do not come in time.
  void wait(const std::vector<std::string>& keys) override;
  void wait(
      const std::vector<std::string>& keys,
      const std::chrono::milliseconds& timeout) override;

  bool hasExtendedApi() const override { return false; }

 private:
  const C10dStorePtr inner_;
  const std::function<bool()> is_over_;
};

} // namespace fsdp::detail
