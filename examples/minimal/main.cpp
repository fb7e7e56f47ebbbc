#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <iostream>

namespace nn = torch::nn;

struct BlockImpl : nn::Module { // plain libtorch
  nn::Linear linear = register_module("linear", nn::Linear(64, 64));
  at::Tensor forward(const at::Tensor& x) { return linear(x).tanh(); }
};
TORCH_MODULE(Block);

void train(const fsdp::World& world) {
  nn::Sequential model(Block(), Block(), Block(), nn::Linear(64, 1));
  const auto options = fsdp::Options()
                           .units(fsdp::each<Block>())
                           .sync_module_states(true); // start from rank 0
  fsdp::FullyShardedDataParallel net(model, world, options);
  torch::optim::AdamW optimizer(net.parameters(), 1e-3);
  const auto table = torch::linspace(-3, 3, 64 * 64).view({64, 64});
  const auto x = table.tensor_split(world.size())[world.rank()]; // own rows
  for (int step = 0; step < 100; ++step) {
    auto loss = torch::mse_loss(net(x), x.sin().sum(1, true));
    loss.backward();          // gradients: the mean over the ranks
    net.clip_grad_norm_(1.0); // one norm over all ranks
    optimizer.step();
    optimizer.zero_grad();
  }
  std::cout << net.memory() << std::endl; // of this rank
}

int main() {
  try {
    const auto world = fsdp::init(); // ranks: the job's processes
    train(world);
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
  }
  return 1;
}
