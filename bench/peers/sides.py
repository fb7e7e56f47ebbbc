"""The training step of the peers, each with its best options: fused AdamW, and
the model of tests/interop/gpt.py, which is that of examples/gpt."""

import datetime
import os

import gpt
import torch
import torch.distributed as dist

LEARNING_RATE = 1e-4
LIMIT_S = 120


def make_model(workload):
    torch.manual_seed(1)
    return gpt.GPT(
        workload.layers, workload.width, workload.heads, workload.vocabulary
    )


def make_tokens(workload, rank):
    """Of this rank: (batch, tokens + 1)."""
    torch.manual_seed(100 + rank)
    return torch.randint(
        workload.vocabulary, (workload.batch, workload.tokens + 1)
    )


def join(workload):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{workload.store}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=LIMIT_S),
    )


def _plain_step(model, tokens):
    """The loop of a program that calls `model` and torch's AdamW."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, fused=True
    )
    inputs = tokens[:, :-1]

    def step():
        gpt.next_token_loss(model(inputs), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def local(workload):
    return _plain_step(make_model(workload), make_tokens(workload, rank=0))


def ddp(workload):
    join(workload)
    model = torch.nn.parallel.DistributedDataParallel(
        make_model(workload), gradient_as_bucket_view=True, static_graph=True
    )
    return _plain_step(model, make_tokens(workload, dist.get_rank()))


def fsdp2(workload):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join(workload)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model(workload)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain_step(model, make_tokens(workload, dist.get_rank()))


def zero3(workload):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    join(workload)
    model = make_model(workload)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, fused=True
        ),
        config={
            "train_micro_batch_size_per_gpu": workload.batch,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        },
    )
    tokens = make_tokens(workload, dist.get_rank())
    inputs = tokens[:, :-1]

    def step():
        engine.backward(gpt.next_token_loss(engine(inputs), tokens))
        engine.step()

    return step


SIDES = {
    "local": local,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "zero3": zero3,
}
