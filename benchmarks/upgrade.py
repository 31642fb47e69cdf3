"""What an upgrade gains: `python benchmarks/upgrade.py TEXT [--seeds 3] [--out FILE]`.

A small Llama of bytes is trained, then trained on as it is and with FEM put into it (`femixer.surgery.upgrade`), with
the same batches.

LT and LTG     the gates learn at the rate of the weights
LT fast        the gates learn at ten times that rate
LT open        the same, and lambda's largest value starts at 0.2 instead of 1e-6: a larger part of the read is free
               energy from the first step on, so the model that is trained on is not quite the one before

Printed are validation losses in nats per byte, and their differences to the plain model of the same seed with 95 %
intervals; --out keeps them as JSON. Finished seeds of such a file are not repeated.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from femixer.reporting.table import Difference
from femixer.surgery import upgrade
from femixer.tasks.lm.data import DataOptions
from femixer.tasks.lm.data.shards import IGNORED, Batches, Shards, Validation
from femixer.training import atomic

CONTEXT, SEQUENCES = 128, 16
STEPS, MORE = 500, 300
RATE, LATER_RATE = 2e-3, 1e-3
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "LT": {"parts": "LT"},
    "LTG": {"parts": "LTG"},
    "LT fast": {"parts": "LT", "faster": 10},
    "LT open": {"parts": "LT", "faster": 10, "lam": 0.2},
}


def small_llama(vocabulary: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=CONTEXT, **sizes))


def train(model: Any, batches: Batches, first: int, steps: int, rate: float, faster: float) -> None:
    """`steps` batches from `first` on; the rate falls like a cosine, that of the gates is `faster` times as large."""
    gates = [p for name, p in model.named_parameters() if ".fem." in name]
    others = [p for name, p in model.named_parameters() if ".fem." not in name]
    groups = [{"params": others, "lr": rate}, *([{"params": gates, "lr": faster * rate}] if gates else [])]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    model.train()
    for step in range(first, first + steps):
        batch = batches(step)
        logits = model(batch.inputs, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def evaluate(model: Any, shards: Shards) -> float:
    model.eval()
    nats, count = 0.0, 0
    for batch in Validation(shards, CONTEXT, SEQUENCES).batches():
        logits = model(batch.inputs, use_cache=False).logits.flatten(0, 1)
        nats += float(cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"))
        count += int((batch.targets != IGNORED).sum())
    return nats / count


def lambdas(model: Any) -> list[float]:
    """The mean of the largest lambda of the channels, by layer."""
    return [round(float(p.clamp(0, 1).mean()), 4) for name, p in model.named_parameters() if name.endswith("lam_max")]


def one_seed(shards: Shards, seed: int) -> list[dict[str, Any]]:
    batches = Batches(shards, CONTEXT, SEQUENCES, seed)
    before = small_llama(shards.vocabulary, seed)
    train(before, batches, 0, STEPS, RATE, 1)
    records = [{"seed": seed, "way": "before", "loss": evaluate(before, shards), "lambda": []}]
    for name, way in WAYS.items():
        model = copy.deepcopy(before)
        if "parts" in way:
            upgrade(model, parts=way["parts"])
        if "lam" in way:
            for parameter_name, p in model.named_parameters():
                if parameter_name.endswith("lam_max"):
                    torch.nn.init.constant_(p, way["lam"])
        train(model, batches, STEPS, MORE, LATER_RATE, way.get("faster", 1))
        records.append({"seed": seed, "way": name, "loss": evaluate(model, shards), "lambda": lambdas(model)})
        print(records[-1], file=sys.stderr, flush=True)
    return records


def show(records: list[dict[str, Any]]) -> None:
    losses = {(record["way"], record["seed"]): record["loss"] for record in records}
    seeds = sorted({record["seed"] for record in records})
    print("| way | validation loss by seed | less than plain, x 1000 |\n|---|---|---|")
    for way in ("before", *WAYS):
        found = [losses[way, seed] for seed in seeds]
        gains = [1000 * (losses["plain", seed] - losses[way, seed]) for seed in seeds]
        gain = "" if way in ("before", "plain") else Difference.of(gains).text(1)
        print(f"| {way} | {', '.join(f'{loss:.4f}' for loss in found)} | {gain} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a text file")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file, to which finished seeds are added")
    options = parser.parse_args()
    shards = DataOptions(data=(options.text,)).tokens()
    out: Path | None = options.out
    records = json.loads(out.read_text(encoding="utf-8")) if out is not None and out.exists() else []
    for seed in range(options.seeds):
        if seed not in {record["seed"] for record in records}:
            records += one_seed(shards, seed)
            if out is not None:
                atomic.write(out, json.dumps(records, indent=1) + "\n")
    show(records)


if __name__ == "__main__":
    main()
