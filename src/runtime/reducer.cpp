#include "runtime/reducer.h"

#include "runtime/errors.h"
#include "runtime/flat_group.h"

#include <c10/util/irange.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace fsdp::detail {

/// [Note: Order of reductions]
struct Reducer::Report {
  std::vector<bool> started;              // by group
  std::vector<bool> pending;              // by group
  std::vector<std::vector<bool>> present; // by group and parameter
  std::vector<uint32_t> order; // rank 0: its order, when it is a new one

  /// Gradients that the agreed order does not cover.
  bool late(size_t group, bool in_order) const {
    return pending[group] && (started[group] || !in_order);
  }
};

Reducer::Reducer(
    const std::vector<FlatGroup*>& groups,
    const std::shared_ptr<Communicator>& reduce_communicator,
    std::shared_ptr<Communicator> report_communicator,
    double divide_factor)
    : report_communicator_(std::move(report_communicator)) {
  gradients_.reserve(groups.size());
  for (auto* group : groups) {
    gradients_.emplace_back(*group, reduce_communicator, divide_factor);
    first_order_.push_back(static_cast<uint32_t>(first_order_.size()));
  }
  std::reverse(first_order_.begin(), first_order_.end());
  order_ = first_order_;
}

void Reducer::begin_pass() {
  TORCH_CHECK_VALUE(
      !std::exchange(lost_, false),
      "fsdp: gradients of earlier passes, which waited for a reduction "
      "(no_sync),"
      " were dropped when a pass failed. Call drop_unreduced_gradients() and"
      " zero_grad(), and start the step again from its first micro-batch.");
  for (auto& gradients : gradients_) {
    gradients.refresh_active();
  }
  start_over();
}

void Reducer::start_over() {
  completed_.clear();
  next_ = 0;
}

void Reducer::add(
    size_t group,
    int64_t index,
    const at::Tensor& gradient,
    bool may_start) {
  auto& gradients = gradients_[group];
  const bool was_complete = gradients.complete();
  gradients.add(index, gradient);
  if (!was_complete && gradients.complete()) {
    completed_.push_back(static_cast<uint32_t>(group));
  }
  if (may_start) {
    start_next();
  }
}

void Reducer::start_next() {
  while (next_ < order_.size()) {
    auto& gradients = gradients_[order_[next_]];
    if (gradients.reduction_started() || !gradients.has_pending() ||
        !gradients.complete()) {
      break;
    }
    gradients.start_reduction();
    ++next_;
    for (auto& other : gradients_) {
      other.finish_ready_reductions();
    }
  }
}

void Reducer::defer() {
  for (auto& gradients : gradients_) {
    gradients.forget_arrivals();
  }
  deferred_ = has_pending();
  start_over();
}

std::vector<uint32_t> Reducer::arrival_order() const {
  auto order = completed_;
  for (const auto group : c10::irange(gradients_.size())) {
    const auto& gradients = gradients_[group];
    const auto id = static_cast<uint32_t>(group);
    if ((gradients.has_pending() || gradients.reduction_started()) &&
        std::find(order.begin(), order.end(), id) == order.end()) {
      order.push_back(id);
    }
  }
  return order;
}

std::string Reducer::encode_report() const {
  std::string report;
  for (const auto& gradients : gradients_) {
    report.push_back(gradients.reduction_started() ? 1 : 0);
    report.push_back(gradients.has_pending() ? 1 : 0);
    for (const bool present : gradients.present()) {
      report.push_back(present ? 1 : 0);
    }
  }
  const auto order = arrival_order();
  if (report_communicator_->rank() == 0 && order != order_) {
    const auto offset = report.size();
    report.resize(offset + order.size() * sizeof(uint32_t));
    std::memcpy(
        report.data() + offset, order.data(), order.size() * sizeof(uint32_t));
  }
  return report;
}

std::vector<Reducer::Report> Reducer::exchange_reports() {
  const auto texts = communicate([&] {
    return report_communicator_->exchange(
        encode_report(), "settlement of gradients");
  });
  std::vector<Report> reports(texts.size());
  for (const auto rank : c10::irange(texts.size())) {
    const auto& text = texts[rank];
    auto& report = reports[rank];
    size_t at = 0;
    for (const auto& gradients : gradients_) {
      report.started.push_back(text.at(at++) != 0);
      report.pending.push_back(text.at(at++) != 0);
      std::vector<bool> present;
      for (size_t i = 0; i < gradients.present().size(); ++i) {
        present.push_back(text.at(at++) != 0);
      }
      report.present.push_back(std::move(present));
    }
    report.order.resize((text.size() - at) / sizeof(uint32_t));
    std::memcpy(report.order.data(), text.data() + at, text.size() - at);
  }
  return reports;
}

void Reducer::start_agreed(const std::vector<Report>& reports) {
  for (const auto group : order_) {
    const bool wanted =
        std::any_of(reports.begin(), reports.end(), [&](const Report& report) {
          return report.started[group] || report.pending[group];
        });
    if (wanted && !gradients_[group].reduction_started()) {
      gradients_[group].start_reduction();
    }
  }
}

void Reducer::start_late(const std::vector<Report>& reports) {
  for (const auto group : c10::irange(gradients_.size())) {
    const bool in_order =
        std::find(order_.begin(), order_.end(), group) != order_.end();
    const bool wanted =
        std::any_of(reports.begin(), reports.end(), [&](const Report& report) {
          return report.late(group, in_order);
        });
    if (wanted) {
      gradients_[group].start_reduction();
    }
  }
}

void Reducer::settle() {
  const auto reports = exchange_reports();
  start_agreed(reports);
  start_late(reports);
  for (const auto group : c10::irange(gradients_.size())) {
    std::vector<bool> anywhere(reports.front().present[group].size());
    for (const auto& report : reports) {
      for (const auto i : c10::irange(anywhere.size())) {
        anywhere[i] = anywhere[i] || report.present[group][i];
      }
    }
    gradients_[group].set_present(anywhere);
    gradients_[group].check_assignable();
    gradients_[group].finish_reductions();
  }
  // Nobody assigns gradients of a pass that failed elsewhere.
  communicate([&] { report_communicator_->barrier("end of the settlement"); });
  if (!reports.front().order.empty()) {
    order_ = reports.front().order;
  }
}

std::vector<at::Tensor> Reducer::assign(Accumulate accumulate) {
  std::vector<at::Tensor> assigned;
  for (auto& gradients : gradients_) {
    const auto of_group = gradients.assign(accumulate);
    assigned.insert(assigned.end(), of_group.begin(), of_group.end());
  }
  deferred_ = false;
  start_over(); // another pass may follow in the same region
  return assigned;
}

void Reducer::drop() {
  lost_ = lost_ || deferred_;
  deferred_ = false;
  start_over();
  order_ = first_order_;
  for (auto& gradients : gradients_) {
    gradients.drop();
  }
}

bool Reducer::has_pending() const {
  return std::any_of(
      gradients_.begin(), gradients_.end(), [](const GroupGradients& each) {
        return each.has_pending();
      });
}

int64_t Reducer::unreduced_bytes() const {
  int64_t bytes = 0;
  for (const auto& gradients : gradients_) {
    bytes += gradients.unreduced_bytes();
  }
  return bytes;
}

} // namespace fsdp::detail
