#include "comm/c10d_polling_store.h"

#include "comm/deadline.h"

#include <fsdp/communicator.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace fsdp::detail {

C10dPollingStore::C10dPollingStore(
    C10dStorePtr inner,
    std::function<bool()> is_over)
    : inner_(std::move(inner)),
      is_over_(std::move(is_over)) {
}

C10dStorePtr C10dPollingStore::clone() {
  return c10::make_intrusive<C10dPollingStore>(inner_, is_over_);
}

void C10dPollingStore::set(
    const std::string& key,
    const std::vector<uint8_t>& value) {
  inner_->set(key, value);
}

std::vector<uint8_t> C10dPollingStore::compareSet(
    const std::string& key,
    const std::vector<uint8_t>& expected,
    const std::vector<uint8_t>& desired) {
  return inner_->compareSet(key, expected, desired);
}

std::vector<uint8_t> C10dPollingStore::get(const std::string& key) {
  wait({key});
  return inner_->get(key);
}

int64_t C10dPollingStore::add(const std::string& key, int64_t value) {
  return inner_->add(key, value);
}

bool C10dPollingStore::deleteKey(const std::string& key) {
  return inner_->deleteKey(key);
}

bool C10dPollingStore::check(const std::vector<std::string>& keys) {
  return inner_->check(keys);
}

int64_t C10dPollingStore::getNumKeys() {
  return inner_->getNumKeys();
}

void C10dPollingStore::wait(const std::vector<std::string>& keys) {
  wait(keys, getTimeout());
}

void C10dPollingStore::wait(
    const std::vector<std::string>& keys,
    const std::chrono::milliseconds& timeout) {
  constexpr std::chrono::milliseconds kLongestPause(10);
  const Deadline deadline(timeout);
  std::chrono::milliseconds pause(1);
  while (!inner_->check(keys)) {
    if (is_over_()) {
      throw CommunicationError("the world ended while ranks connected");
    }
    if (deadline.passed()) {
      throw CommunicationError(
          "ranks did not connect within " + deadline.waited());
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

} // namespace fsdp::detail
