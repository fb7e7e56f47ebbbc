#include "runtime/backward_engine.h"

#include "runtime/errors.h"
#include "runtime/internal_guard.h"
#include "runtime/involvement.h"
#include "runtime/net.h"
#include "runtime/recipe.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <mutex>

namespace fsdp::detail {

namespace {

using torch::autograd::Engine;
using torch::autograd::edge_list;
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

/// [Note: Regions] Engine::queue_callback would not do: when a pass fails, its
/// callbacks do not run.
class BackwardEngine final : public Engine {
 public:
  ~BackwardEngine() override {
    stop();
  }

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
      gradients = Engine::execute(
          roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
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

  std::unique_ptr<torch::autograd::SavedVariableHooks>
  get_default_saved_variable_hooks() override {
    return InternalGuard::active() ? nullptr : recipe_hooks();
  }
};

Engine& backward_engine() {
  static auto* engine = new BackwardEngine; // its threads outlive main
  return *engine;
}

} // namespace

void install_backward_engine() {
  static std::once_flag once;
  std::call_once(once, [] {
    torch::autograd::set_default_engine_stub(&backward_engine);
  });
}

bool inside_backward_pass() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

} // namespace fsdp::detail
