#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <iostream>

namespace nn = torch::nn;

struct BlockImpl : nn::Module {
  nn::Linear linear = register_module("linear", nn::Linear(64, 64));
  at::Tensor forward(const at::Tensor& x) { return linear(x).tanh(); }
};
TORCH_MODULE(Block);

struct ModelImpl : nn::Module { // any torch::nn::Module
  nn::Sequential blocks = register_module("blocks", nn::Sequential());
  nn::Linear head = register_module("head", nn::Linear(64, 1));
  ModelImpl() {
    for (int i = 0; i < 4; ++i) {
      blocks->push_back(Block());
    }
  }
  at::Tensor forward(const at::Tensor& x) { return head(blocks->forward(x)); }
};
TORCH_MODULE(Model);

void train(const fsdp::World& world) {
  const auto options = fsdp::Options()
                           .units(fsdp::each<Block>())
                           .sync_module_states(true); // start from rank 0
  fsdp::FullyShardedDataParallel net(Model(), world, options);
  torch::optim::AdamW optimizer(net.parameters(), 1e-3);
  const auto table = torch::linspace(-3, 3, 64 * 64).view({64, 64});
  const auto x = table.chunk(world.size())[world.rank()]; // this rank's rows
  for (int step = 0; step < 100; ++step) {
    auto loss = torch::mse_loss(net(x), x.sin().sum(1, true));
    loss.backward();          // gradients: the mean over the ranks
    net.clip_grad_norm_(1.0); // one norm over all ranks
    optimizer.step();
    optimizer.zero_grad();
  }
  if (world.rank() == 0) {
    std::cout << net.memory() << std::endl;
  }
}

int main() {
  at::get_num_threads(); // sets torch's thread pools up
  fsdp::run_as_threads(2, train);
}
