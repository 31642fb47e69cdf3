"""Memory of a training step on a long sequence, alone and with the sequence cut over processes (context parallelism).

    python benchmarks/parallel_memory.py                     # 262,144 tokens, a gla model, 1 and 2 processes
    python benchmarks/parallel_memory.py --tokens 32768 --prior softmax --ranks 1 2 4

Each process prints its peak of resident memory above that after importing everything and building the model. The
processes are connected through gloo; no number depends on how fast they are.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from femixer.models import FEMConfig, FEMForCausalLM
from femixer.parallel import parallelize

MIB = 2**20


def resident() -> int:
    """Bytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def step(options: argparse.Namespace, rank: int, ranks: int, meeting: str) -> dict[str, float]:
    """The loss of one training step, and the peak of memory in MiB above what was there before it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": options.width, "num_hidden_layers": options.layers, "num_attention_heads": 4}
    model = FEMForCausalLM(FEMConfig(vocab_size=256, prior=options.prior, intermediate_size=2 * options.width, **shape))
    if ranks > 1:
        distributed.init_process_group("gloo", f"file://{meeting}", timedelta(hours=1), world_size=ranks, rank=rank)
        model = parallelize(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)))
    optimizer = torch.optim.AdamW(model.parameters())
    words = torch.randint(256, (1, options.tokens))
    model(words[:, :256], labels=words[:, :256]).loss.backward()  # kernels are loaded
    optimizer.zero_grad()
    before = resident()
    loss = model(words, labels=words).loss
    loss.backward()
    optimizer.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if ranks > 1:
        distributed.destroy_process_group()
    return {"ranks": ranks, "rank": rank, "loss": loss.item(), "peak MiB": (peak - before) / MIB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--prior", default="gla")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--process", nargs=3, metavar=("RANK", "RANKS", "MEETING"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        rank, ranks, meeting = options.process
        print(json.dumps(step(options, int(rank), int(ranks), meeting)))
        return
    alone = None
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, *sys.argv, "--process"]
            started = [
                subprocess.Popen(
                    [*command, str(rank), str(ranks), f"{folder}/meeting"],
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
                for rank in range(ranks)
            ]
            said = [process.communicate()[0] for process in started]
        for line in said:
            found = json.loads(line.splitlines()[-1])
            alone = found["peak MiB"] if alone is None else alone
            print(
                f"{ranks} processes, rank {found['rank']}: {found['peak MiB']:.0f} MiB "
                f"({found['peak MiB'] / alone:.2f} of the first), loss {found['loss']:.6f}"
            )


if __name__ == "__main__":
    main()
