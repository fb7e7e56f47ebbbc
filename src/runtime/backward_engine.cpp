#include "runtime/backward_engine.h"

#include "runtime/errors.h"
#include "runtime/internal_guard.h"
#include "runtime/involvement.h"
#include "runtime/net.h"
#include "runtime/recipe.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <torch/csrc/autograd/anomaly_mode.h>

#include <atomic>
#include <mutex>

namespace fsdp::detail {

namespace {

using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::variable_list;

/// Backward regions of the nets that one pass involves.
class BackwardRegions {
 public:
  BackwardRegions(const edge_list& roots, bool accumulates) {
    for (auto& net : involved_nets(roots)) {
      try {
        net->enter(RegionKind::kBackward, accumulates);
      } catch (const std::exception& error) {
        fail(text_of(error));
        throw;
      }
      open_.push_back(std::move(net));
    }
  }

  void close() {
    while (!open_.empty()) {
      const auto net = std::move(open_.back());
      open_.pop_back();
      try {
        net->leave(RegionKind::kBackward);
      } catch (const std::exception& error) {
        fail(text_of(error));
        throw;
      }
    }
  }

  void fail(const std::string& reason) {
    while (!open_.empty()) {
      open_.back()->fail(RegionKind::kBackward, reason);
      open_.pop_back();
    }
  }

 private:
  std::vector<std::shared_ptr<Net>> open_;
};

/// Another engine that the program has installed, or null. It goes on doing
/// what it does inside of ours.
std::atomic<Engine*> program_engine{nullptr};

/// [Note: Regions] Engine::queue_callback would not do: when a pass fails, its
/// callbacks do not run.
class BackwardEngine final : public Engine {
 public:
  BackwardEngine() {
    // libtorch starts the threads of one engine per process, the first that
    // executes. Let that be its own, and start those of this one here.
    Engine::get_base_engine().initialize_device_threads_pool();
    start_device_threads();
  }

  ~BackwardEngine() override { stop(); }

  variable_list execute(
      const edge_list& roots,
      const variable_list& inputs,
      bool keep_graph,
      bool create_graph,
      bool accumulate_grad,
      const edge_list& outputs) override {
    BackwardRegions regions(roots, accumulate_grad);
    variable_list gradients;
    try {
      auto* other = program_engine.load();
      gradients = other != nullptr ? other->execute(
                                         roots,
                                         inputs,
                                         keep_graph,
                                         create_graph,
                                         accumulate_grad,
                                         outputs)
                                   : Engine::execute(
                                         roots,
                                         inputs,
                                         keep_graph,
                                         create_graph,
                                         accumulate_grad,
                                         outputs);
    } catch (const std::exception& error) {
      regions.fail(text_of(error));
      throw;
    } catch (...) {
      regions.fail("an exception of an unknown type in backward");
      throw;
    }
    regions.close();
    return gradients;
  }

  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata()
      override {
    auto* other = program_engine.load();
    return other != nullptr ? other->make_anomaly_metadata()
                            : Engine::make_anomaly_metadata();
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks>
  get_default_saved_variable_hooks() override {
    if (InternalGuard::active()) {
      return nullptr;
    }
    auto* other = program_engine.load();
    auto hooks = recipe_hooks();
    return hooks != nullptr || other == nullptr
        ? std::move(hooks)
        : other->get_default_saved_variable_hooks();
  }
};

Engine& backward_engine() {
  static auto* engine = new BackwardEngine; // its threads outlive main
  return *engine;
}

} // namespace

void install_backward_engine() {
  static std::mutex mutex;
  auto& mine = backward_engine();
  if (&Engine::get_default_engine() == &mine) {
    return;
  }
  const std::lock_guard lock(mutex);
  auto& current = Engine::get_default_engine();
  if (&current == &mine) {
    return;
  }
  if (&current != &Engine::get_base_engine()) {
    program_engine = &current;
  }
  torch::autograd::set_default_engine_stub(&backward_engine);
}

bool inside_backward_pass() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

} // namespace fsdp::detail
