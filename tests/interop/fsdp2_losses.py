#!/usr/bin/env python3
"""Trains the GPT of gpt.py with fully_shard of PyTorch (FSDP2) on CPU ranks and
prints its losses as one line of JSON, like examples/gpt/losses.cpp."""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time

import processes

LIMIT_S = 60


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in [
        ("layers", 4),
        ("width", 64),
        ("heads", 4),
        ("vocabulary", 128),
        ("ranks", 2),
        ("batch", 2),
        ("tokens", 16),
        ("steps", 20),
        ("seed", 1),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--fused", action="store_true", help="fused AdamW")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    return parser.parse_args()


def draw(arguments):
    """All that is random, in the order of examples/gpt/losses.cpp."""
    import gpt
    import torch

    torch.manual_seed(arguments.seed)
    model = gpt.GPT(
        arguments.layers,
        arguments.width,
        arguments.heads,
        arguments.vocabulary,
    )
    rows = arguments.ranks * arguments.batch
    tokens = [
        torch.randint(arguments.vocabulary, (rows, arguments.tokens + 1))
        for _ in range(arguments.steps)
    ]
    return model, tokens


def train(model, tokens, arguments):
    """Returns the mean loss over the ranks and the seconds of each step."""
    import gpt
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (arguments.ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # With the default eps of 1e-8 Adam hides a wrong scale of all gradients, and
    # blows rounding up where a gradient is zero by symmetry (the bias of keys).
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=arguments.lr,
        betas=(0.9, 0.999),
        eps=1e-4,
        weight_decay=0.01,
        fused=arguments.fused,
    )
    first_row = arguments.rank * arguments.batch
    losses, seconds = [], []
    for batch in tokens:
        begin = time.perf_counter()
        mine = batch[first_row : first_row + arguments.batch]
        loss = gpt.next_token_loss(model(mine[:, :-1]), mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    return (mean / arguments.ranks).tolist(), seconds


def reason_to_skip() -> str:
    try:
        import torch.distributed as dist
    except ImportError as error:
        return f"{sys.executable} has no torch.distributed: {error}"
    if not (dist.is_available() and dist.is_gloo_available()):
        return f"the torch of {sys.executable} has no Gloo"
    return ""


def run_rank(arguments):
    import datetime

    import gpt
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments.store}",
        rank=arguments.rank,
        world_size=arguments.ranks,
        timeout=datetime.timedelta(seconds=LIMIT_S),
    )
    model, tokens = draw(arguments)
    result = {
        "weights": gpt.fingerprint(model.parameters()),
        "tokens": gpt.fingerprint(tokens),
    }
    result["losses"], seconds = train(model, tokens, arguments)
    result["step_ms"] = 1000 * statistics.median(seconds)
    dist.destroy_process_group()
    print(json.dumps(result))


def main():
    arguments = parse_arguments()
    if arguments.rank is not None:
        reason = reason_to_skip()
        if reason:
            print(reason, file=sys.stderr)
            return processes.SKIPPED
        run_rank(arguments)
        return 0
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="fsdp2_losses.") as folder:
        store = os.path.join(folder, "store")
        commands = {
            f"rank {rank}": [sys.executable, "-B", *sys.argv]
            + [f"--rank={rank}", f"--store={store}"]
            for rank in range(arguments.ranks)
        }
        try:
            outputs = processes.run_together(commands, LIMIT_S)
        except processes.Failed as error:
            print(f"fsdp2_losses: {error}", file=sys.stderr)
            return error.status
    print(outputs["rank 0"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
