#include <fsdp/sharded_module.h>

#include "runtime/errors.h"
#include "runtime/net.h"

#include <exception>
#include <stdexcept>
#include <utility>

namespace fsdp {

using detail::RegionKind;

Region::Region(std::shared_ptr<detail::Net> net)
    : net_(std::move(net)),
      exceptions_(std::uncaught_exceptions()) {
  net_->enter(RegionKind::kForward, /*accumulates=*/false);
}

Region::Region(Region&& other) noexcept
    : net_(std::move(other.net_)),
      exceptions_(other.exceptions_) {
}

Region::~Region() {
  if (net_ == nullptr) {
    return;
  }
  if (std::uncaught_exceptions() > exceptions_) {
    abandon(std::runtime_error("an exception left a region"));
    return;
  }
  const auto net = net_;
  try {
    close();
  } catch (const std::exception&) {
    net->remember_error(std::current_exception());
  }
}

void Region::close() {
  if (const auto net = std::exchange(net_, nullptr)) {
    net->leave(RegionKind::kForward);
  }
}

void Region::abandon(const std::exception& error) noexcept {
  if (const auto net = std::exchange(net_, nullptr)) {
    net->fail(RegionKind::kForward, detail::text_of(error));
  }
}

NoSync::NoSync(std::shared_ptr<detail::Net> net) : net_(std::move(net)) {
  net_->add_no_sync(1);
}

NoSync::NoSync(NoSync&& other) noexcept : net_(std::move(other.net_)) {
}

NoSync::~NoSync() {
  if (net_ != nullptr) {
    net_->add_no_sync(-1);
  }
}

WholeParameters::WholeParameters(
    std::shared_ptr<detail::Net> net,
    WholeParametersOptions options)
    : net_(std::move(net)),
      options_(options) {
  net_->open_whole();
}

WholeParameters::WholeParameters(WholeParameters&& other) noexcept
    : net_(std::move(other.net_)),
      options_(other.options_) {
}

WholeParameters::~WholeParameters() {
  const auto net = net_;
  try {
    close();
  } catch (const std::exception&) {
    net->remember_error(std::current_exception());
  }
}

void WholeParameters::close() {
  if (const auto net = std::exchange(net_, nullptr)) {
    net->close_whole(
        options_.write_back ? detail::Writes::kKeep : detail::Writes::kDrop);
  }
}

} // namespace fsdp
