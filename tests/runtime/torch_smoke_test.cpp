#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/version.h>

#include "fsdp/version.h"

namespace fsdp {
namespace {

std::string major_minor(const std::string& version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

TEST(TorchSmoke, VersionIsTheRequestedOne) {
  const std::string wanted = FSDP_TEST_TORCH_VERSION;
  if (wanted.empty()) {
    GTEST_SKIP() << "no version was requested: built against " << TORCH_VERSION;
  }
  EXPECT_EQ(major_minor(TORCH_VERSION), major_minor(wanted));
}

TEST(TorchSmoke, AutogradGivesTheGradientOfASquare) {
  const auto x = torch::tensor({1.0, -2.0, 3.0}, torch::requires_grad());
  (x * x).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), 2 * x.detach()));
}

TEST(TorchSmoke, LibraryVersionMatchesItsHeaders) {
  EXPECT_EQ(
      std::string(version()),
      std::to_string(FSDP_VERSION_MAJOR) + "." +
          std::to_string(FSDP_VERSION_MINOR) + "." +
          std::to_string(FSDP_VERSION_PATCH));
}

} // namespace
} // namespace fsdp
