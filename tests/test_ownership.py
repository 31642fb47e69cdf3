"""Parameters belong to whoever shards, offloads, quantizes or adapts them: the tools themselves, as users run them.

`python test_ownership.py FOLDER RANK` is one of the processes of the sharded scenarios, spawned and not forked:
a forked process runs without compiled kernels.
"""

import json
import os
import random
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from femixer.cli import main
from femixer.models import FEMConfig, FEMForCausalLM
from femixer.priors import PRIORS

WORDS, WORLD, STEPS = 29, 2, 3
SHARDED = ("softmax", "gla", "mamba")
HERE = Path(__file__)
PLACES = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.norm": "cpu",
    "lm_head": "cpu",
}
priors = pytest.mark.parametrize("prior", PRIORS)


def build(prior: str) -> FEMForCausalLM:
    """Two layers, with every path in use: no parameter is zero."""
    torch.manual_seed(0)
    shape = {"hidden_size": 24, "intermediate_size": 34, "num_hidden_layers": 2, "num_attention_heads": 3}
    model = FEMForCausalLM(FEMConfig(vocab_size=WORDS, prior=prior, **shape)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def words(seed: int = 0, rows: int = 4) -> Tensor:
    return torch.randint(WORDS, (rows, 11), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(words()).logits


def linears(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


# Sharded in spawned processes


def fit(model: nn.Module, rows: slice = slice(None)) -> list[float]:
    """Losses of some steps on these rows of the batches."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(STEPS):
        batch = words(step)[rows]
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adapted(model: nn.Module) -> Any:
    """With LoRA on every linear map; both of its matrices are random, so that both have gradients."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1, generator=generator)
    return model


# What is learned by one process alone: the model itself, or its adapters.
TOOLS = {"fsdp": lambda model: model, "lora": adapted}


def scenario(prior: str, tool: str, rank: int) -> list[float]:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = TOOLS[tool](build(prior))
    if tool == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    each = len(words()) // WORLD
    return fit(model, slice(rank * each, (rank + 1) * each))


def attempt(prior: str, tool: str, rank: int) -> list[float] | str:
    """The losses, or what went wrong."""
    try:
        return scenario(prior, tool, rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def process(folder: Path, rank: int) -> None:
    """Run all scenarios and write down what came of them."""
    from torch import distributed

    torch.set_num_threads(1)
    meeting, patience = f"file://{folder / 'meeting'}", timedelta(seconds=120)
    distributed.init_process_group("gloo", meeting, patience, world_size=WORLD, rank=rank)
    outcome: dict[str, Any] = {}
    for prior in SHARDED:
        outcome |= {f"{prior} {tool}": attempt(prior, tool, rank) for tool in TOOLS}
    (folder / f"{rank}.json").write_text(json.dumps(outcome))
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of one process, this one, which also compiles the kernels for the others; and of two."""
    one = {f"{prior} {tool}": fit(TOOLS[tool](build(prior))) for prior in SHARDED for tool in TOOLS}
    folder = tmp_path_factory.mktemp("processes")
    commands = [[sys.executable, str(HERE), str(folder), str(rank)] for rank in range(WORLD)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        for each in started:
            _, said = each.communicate(timeout=300)
            assert each.returncode == 0, said
    finally:
        for each in started:
            each.kill()
    return [one, *(json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD))]


@pytest.mark.parametrize("prior", SHARDED)
@pytest.mark.parametrize("tool", TOOLS)
def test_two_processes_learn_as_one(outcomes: list[dict[str, Any]], prior: str, tool: str) -> None:
    """Sharded by FSDP2, and adapted by LoRA under DDP, which refuses parameters without gradients."""
    alone, *found = (each[f"{prior} {tool}"] for each in outcomes)
    assert all(isinstance(each, list) for each in found), found
    for step, (loss, *parts) in enumerate(zip(alone, *found, strict=True)):
        assert sum(parts) / WORLD == pytest.approx(loss, rel=1e-5), f"step {step}"


def test_torchrun_trains_a_sharded_language_model_as_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)
    text = "".join(draw.choice(["violet ", "quartz ", "jumbled ", "skewing\n"]) for _ in range(400))
    (tmp_path / "text.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    small = "--tokenizer bytes --hidden-size 12 --layers 1 --heads 2 --context 23 --batch-tokens 92 --threads 1"
    short = "--steps 4 --evaluate-every 4 --sample-tokens 2 --validation-tokens None --device cpu"
    command = ["lm", "train", "--data", "text.txt", *small.split(), *short.split()]
    assert main([*command, "--out", "one"]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    sharded = [*torchrun, "-m", "femixer", *command, "--shard", "full", "--out", "two"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(sharded, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (losses(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert len(one) > 1
    assert two == pytest.approx(one, rel=1e-4)


def losses(path: Path) -> dict[str, float]:
    """By split and step."""
    records = map(json.loads, path.read_text().splitlines())
    return {f"{record['split']} {record['step']}": record["loss"] for record in records if "loss" in record}


# Offloaded


@priors
@pytest.mark.parametrize("tool", ["cpu_offload", "disk_offload", "dispatch_model"])
def test_offloaded_models_compute_the_same(prior: str, tool: str, tmp_path: Path) -> None:
    import accelerate

    model = build(prior)
    expected = logits(model)
    device = torch.device("cpu")
    if tool == "cpu_offload":
        accelerate.cpu_offload(model, device)
    elif tool == "disk_offload":
        accelerate.disk_offload(model, str(tmp_path), device)
    else:
        accelerate.dispatch_model(model, PLACES, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    assert any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(logits(model), expected)


@priors
def test_models_with_layers_on_disk_generate_the_same(prior: str, tmp_path: Path) -> None:
    model = build(prior)
    model.save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(words(), **options)
    loaded = FEMForCausalLM.from_pretrained(
        tmp_path / "model", device_map=PLACES, offload_folder=tmp_path / "offload"
    ).eval()
    assert any(parameter.is_meta for parameter in loaded.parameters())
    assert torch.equal(loaded.generate(words(), **options), expected)


# Quantized


@priors
def test_weights_of_eight_bits_by_torchao(prior: str) -> None:
    """Logits and the inputs' gradients are those of the weights that the eight bits stand for."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    low, rounded = build(prior).requires_grad_(False), build(prior).requires_grad_(False)
    quantize_(low, Int8WeightOnlyConfig())
    for quantized, module in zip(linears(low).values(), linears(rounded).values(), strict=True):
        assert type(quantized.weight).__name__ == "Int8Tensor"
        module.weight.copy_(quantized.weight.dequantize())
    results = []
    for model in (low, rounded):
        x = model.get_input_embeddings()(words()).requires_grad_()
        y = model(inputs_embeds=x).logits
        results.append((logits(model), y.detach(), *torch.autograd.grad(y.square().sum(), x)))
    # The two products round differently; gradients through features near zero show it more.
    for found, expected, allowed in zip(*results, (2e-6, 2e-6, 1e-4), strict=True):
        assert relative(found, expected) < allowed
    assert relative(logits(low), logits(build(prior))) > 1e-3


@priors
def test_quantized_models_are_loaded_by_transformers(prior: str, tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    model = build(prior)
    model.save_pretrained(tmp_path)
    loaded = FEMForCausalLM.from_pretrained(tmp_path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    kinds = [type(module.weight).__name__ for name, module in linears(loaded).items() if name != "lm_head"]
    assert {*kinds} == {"Int8Tensor"}
    assert 0 < relative(logits(loaded.eval()).float(), logits(model)) < 0.05


@priors
def test_linear_layers_are_replaced_by_dynamic_quantization(prior: str) -> None:
    model = build(prior)
    expected = logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch recommends torchao
        low = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        assert not any(type(module) is nn.Linear for module in low.modules())
        assert 0 < relative(logits(low), expected) < 0.1


# Adapted


@priors
def test_every_adapter_learns_and_merging_changes_nothing(prior: str) -> None:
    plain = build(prior)
    count, before = len(linears(plain)) - 1, logits(plain)  # not the head
    model = adapted(plain)
    model(words(), labels=words()).loss.backward()
    adapters = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    assert len(adapters) == 2 * count
    idle = [name for name, parameter in adapters.items() if parameter.grad is None or not parameter.grad.any()]
    assert not idle
    expected = logits(model)
    assert relative(expected, before) > 1e-3
    assert relative(logits(model.merge_and_unload()), expected) < 1e-6


if __name__ == "__main__":
    process(Path(sys.argv[1]), int(sys.argv[2]))
