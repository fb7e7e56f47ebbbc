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
    std::shared_ptr<Communicator> report_communicator,
    double divide_factor)
    : report_communicator_(std::move(report_communicator)),
      order_(groups.size()) {
  for (auto* group : groups) {
    gradients_.emplace_back(*group, divide_factor);
  }
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
  order_.start_over();
  started_.clear();
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
    order_.completed(static_cast<uint32_t>(group));
  }
  if (may_start) {
    start_next();
  }
}

void Reducer::start_next() {
  while (const auto turn = order_.turn()) {
    auto& gradients = gradients_[*turn];
    if (gradients.reduction_started() || !gradients.has_pending() ||
        !gradients.complete()) {
      break;
    }
    start(*turn);
    order_.started_turn();
    while (!started_.empty() && gradients_[started_.front()].is_ready()) {
      finish_first();
    }
  }
}

void Reducer::start(size_t group) {
  gradients_[group].start_reduction();
  started_.push_back(group);
}

void Reducer::finish_first() {
  gradients_[started_.front()].finish_reduction();
  started_.pop_front();
}

void Reducer::defer() {
  for (auto& gradients : gradients_) {
    gradients.forget_arrivals();
  }
  deferred_ = has_pending();
  start_over();
}

std::vector<uint32_t> Reducer::proposed_order() const {
  std::vector<bool> had_gradients;
  for (const auto& gradients : gradients_) {
    had_gradients.push_back(
        gradients.has_pending() || gradients.reduction_started());
  }
  return order_.proposed(had_gradients);
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
  const auto order = proposed_order();
  if (report_communicator_->rank() == 0 && order != order_.agreed()) {
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
  for (const auto group : order_.agreed()) {
    const bool wanted =
        std::any_of(reports.begin(), reports.end(), [&](const Report& report) {
          return report.started[group] || report.pending[group];
        });
    if (wanted && !gradients_[group].reduction_started()) {
      start(group);
    }
  }
}

void Reducer::start_late(const std::vector<Report>& reports) {
  for (const auto group : c10::irange(gradients_.size())) {
    const bool in_order = order_.has(static_cast<uint32_t>(group));
    const bool wanted =
        std::any_of(reports.begin(), reports.end(), [&](const Report& report) {
          return report.late(group, in_order);
        });
    if (wanted) {
      start(group);
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
  }
  while (!started_.empty()) {
    finish_first();
  }
  for (auto& gradients : gradients_) {
    gradients.finish_averages();
  }
  // Nobody assigns gradients of a pass that failed elsewhere.
  communicate([&] { report_communicator_->barrier("end of the settlement"); });
  if (!reports.front().order.empty()) {
    order_.agree(reports.front().order);
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
  order_.forget();
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
