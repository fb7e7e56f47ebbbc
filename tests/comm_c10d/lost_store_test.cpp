// The process that serves the store ends while others start.

#include "comm/c10d_rendezvous.h"
#include "comm/sample_data.h"
#include "gloo_world.h"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace fsdp::detail {
namespace {

constexpr std::chrono::seconds kStoreLimit(5);

class LostStore : public testing::Test {
 protected:
  c10::intrusive_ptr<c10d::TCPStore> serve() {
    c10d::TCPStoreOptions options;
    options.port = 0;
    options.isServer = true;
    options.waitWorkers = false;
    auto server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    address_.host = "127.0.0.1";
    address_.port = server->getPort();
    return server;
  }

  LostStore() {
    const auto server = serve();
    store_ = open_store(address_, user_);
  } // the server ends

  const StoreUser user_{.rank = 1, .size = 3, .timeout = kStoreLimit};
  StoreAddress address_;
  c10::intrusive_ptr<c10d::Store> store_;
};

TEST_F(LostStore, IsAnErrorOfTheRendezvousThatNamesRank0) {
  const auto text =
      error_of([&] { C10dRendezvous(address_, store_, user_, "job"); });
  EXPECT_TRUE(contains(text, "rank 1/3: ")) << text;
  EXPECT_TRUE(contains(text, "lost the store at " + address_.text())) << text;
  EXPECT_TRUE(contains(text, "did rank 0 end?")) << text;
}

TEST_F(LostStore, DoesNotHideForWhomARankWaits) {
  auto server = serve();
  const auto store = open_store(address_, user_);
  C10dRendezvous rendezvous(address_, store, user_, "job");
  store->set("fsdp/job/0/0", std::vector<uint8_t>{1});
  std::thread end([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    server.reset();
  });
  const auto text =
      error_of([&] { rendezvous.exchange("", "hosts", kStoreLimit); });
  end.join();
  // Rank 1 is this one, and has come.
  EXPECT_TRUE(contains(text, "hosts: waited for rank 2 and lost the store"))
      << text;
}

TEST_F(LostStore, IsAnErrorOfTheWorldThatNamesRank0) {
  const auto text =
      error_of([&] { make_gloo_communicator(store_, 1, 3, kStoreLimit); });
  EXPECT_TRUE(contains(text, "start of the world: rank 1/3: ")) << text;
  EXPECT_TRUE(contains(text, "serves the store (rank 0, unless")) << text;
}

} // namespace
} // namespace fsdp::detail
