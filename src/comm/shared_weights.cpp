#include "comm/shared_weights.h"

#include <stdexcept>
#include <utility>

namespace fsdp::detail {

SharedWeights::SharedWeights(std::shared_ptr<SharedSlices> slices)
    : slices_(std::move(slices)) {
}

void SharedWeights::await_writable(const std::string& what) {
  retire();
  if (state_ == State::kRetired) {
    slices_->await_retired(what);
    state_ = State::kWritable;
  }
}

void SharedWeights::publish() {
  if (state_ != State::kWritable) {
    throw std::logic_error("SharedWeights: published before it was writable");
  }
  slices_->publish();
  state_ = State::kPublished;
}

void SharedWeights::await_readable(const std::string& what) {
  if (state_ != State::kPublished) {
    throw std::logic_error("SharedWeights: read before it was published");
  }
  slices_->await_published(what);
}

void SharedWeights::retire() {
  if (state_ == State::kPublished) {
    slices_->retire();
    state_ = State::kRetired;
  }
}

} // namespace fsdp::detail
