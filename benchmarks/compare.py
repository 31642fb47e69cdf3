"""Two versions of femixer, measured in turns: `python benchmarks/compare.py OLD_PYTHON NEW_PYTHON [rounds] [cases]`.

Each interpreter has one version installed and serves the cases it is asked for, so that both see the same minutes of
the machine. Printed are the least milliseconds of each, and the median over rounds of new / old: of the time on the
clock, and of the processors' time, which other work on the machine hardly changes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

SERVER = r"""
import gc, os, sys, time
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch
import femixer.models as models
from femixer import FreeEnergyMixer

torch.manual_seed(0)
cases = {}

def layer(name, **options):
    mixer, x = FreeEnergyMixer(512, 8, **options), torch.randn(2, 1024, 512)

    def forward():
        with torch.no_grad():
            mixer(x)

    def train():
        mixer(x.clone().requires_grad_()).sum().backward()

    cases[f"{name}-forward"], cases[f"{name}-train"] = forward, train

def language(name, **fields):
    sizes = dict(vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=4)
    model, ids = models.FEMForCausalLM(models.FEMConfig(**sizes, **fields)), torch.randint(0, 512, (4, 256))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def train():
        model.train()
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()

    def decode():
        model.eval()
        with torch.no_grad():
            cache = model(ids[:1, :128], use_cache=True).past_key_values
            for i in range(32):
                cache = model(ids[:1, i : i + 1], past_key_values=cache, use_cache=True).past_key_values

    cases[f"lm-{name}-train"], cases[f"lm-{name}-decode"] = train, decode

layer("attention", parts="")
layer("softmax-LTG", parts="LTG")
for prior in ("softmax", "linear", "gla", "aft", "decay", "ssm", "mamba"):
    layer(prior, prior=prior)
layer("gla-channel", prior="gla", prior_options={"decay": "channel"})
language("attention", mixer="attention")
for prior in ("softmax", "gla", "mamba"):
    language(prior, prior=prior)
vision = models.FEMForImageClassification(models.preset("deit-tiny", num_hidden_layers=3))
pictures, labels = torch.randn(8, 3, 224, 224), torch.randint(0, 1000, (8,))
cases["vision-train"] = lambda: vision(pictures, labels=labels).loss.backward()
for case in cases.values():
    case()
print(" ".join(cases), flush=True)
for line in sys.stdin:
    case, times = cases[line.strip()], []
    gc.collect()
    for _ in range(2):
        start = time.perf_counter(), time.process_time()
        case()
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    print(*map(min, zip(*times)), flush=True)
"""


def main(old: str, new: str, rounds: str = "4", *chosen: str) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    servers = [subprocess.Popen([python, "-c", SERVER], **pipes) for python in (old, new)]  # type: ignore[call-overload]
    ready = [server.stdout.readline().split() for server in servers]
    times: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in chosen or ready[0]}

    def ask(server: subprocess.Popen[str], name: str) -> tuple[float, float]:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{name}\n")
        server.stdin.flush()
        clock, processors = map(float, server.stdout.readline().split())
        return clock, processors

    for _ in range(int(rounds)):
        for name, measured in times.items():
            measured.append([ask(server, name) for server in servers])
    print(f"{'case':<22}{'old ms':>9}{'new ms':>9}{'new / old':>11}{'processors':>12}")
    for name, measured in times.items():
        old, new = (1e3 * min(clock for clock, _ in column) for column in zip(*measured, strict=True))
        clock, processors = (statistics.median(b[i] / a[i] for a, b in measured) for i in (0, 1))
        print(f"{name:<22}{old:>9.1f}{new:>9.1f}{clock:>11.3f}{processors:>12.3f}")
    for server in servers:
        server.kill()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
