"""Several ranks compute what one computes: sequences, heads and batches divided over them.

`python test_parallel.py FOLDER RANK RANKS` is one of the ranks, spawned and connected through gloo. Every rank computes
the result of one process itself and writes down how far its part of the divided one is away.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from femixer import FreeEnergyMixer
from femixer.parallel.carrying import carried_energies, carried_reads, carried_sums

KINDS: dict[str, dict[str, Any]] = {
    "softmax": {"kv_heads": 2},
    "softmax, window": {"window": 5},
    "softmax, bias": {"prior_options": {"score_bias": "alibi"}},
    "linear": {"kv_heads": 2},
    "gla": {"kv_heads": 2},
    "gla, channel": {"prior_options": {"decay": "channel"}},
    "aft": {},
    "decay": {},
    "ssm": {"prior_options": {"state_size": 3}},
    "mamba": {"prior_options": {"state_size": 3}},
    "mamba, not normalized": {"prior_options": {"state_size": 3, "normalize": False}},
    "mamba-interactive": {"prior_options": {"state_size": 3}},
}
DIM, HEADS, WORDS, STEPS = 24, 4, 29, 20
TOKENS = 24  # stretches of 3 tokens on four ranks
Errors = dict[str, float]


def mixer(kind: str, dtype: torch.dtype, **options: Any) -> FreeEnergyMixer:
    from femixer.priors import Alibi

    torch.manual_seed(0)
    options = {**KINDS[kind], **options}
    if "score_bias" in options.get("prior_options", {}):
        options["prior_options"] = {"score_bias": Alibi(HEADS)}
    layer = FreeEnergyMixer(DIM, HEADS, prior=kind.split(",")[0], dtype=dtype, **options)
    return disturbed(layer)


def disturbed(model: Any) -> Any:
    """With every path in use: no parameter is zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def ids() -> Tensor:
    """Segments that end at cuts, before and behind them, some within one stretch; padding at both ends and inside."""
    segments = torch.tensor([[0] * 7 + [1] * 2 + [2] * 11 + [3] * 4, [5] * TOKENS, [0] * 6 + [1] * 6 + [2] * 12])
    for row, places in ((0, [3, 11, 12, 13]), (1, [*range(6), 9, *range(20, TOKENS)])):
        segments[row, places] = -1
    return segments


GIVEN: dict[str, Callable[[], dict[str, Tensor]]] = {
    "nothing": dict,
    "mask": lambda: {"mask": ids() >= 0},
    "segments": lambda: {"segments": ids()},
}


def relative(actual: Tensor, expected: Tensor, scale: float) -> float:
    """Relative to the largest number, but to no less than `scale`: some gradients are zero but for rounding."""
    return float((actual - expected).detach().abs().max() / max(float(expected.detach().abs().max()), scale))


def same_as_alone(layer: FreeEnergyMixer, mesh: Any, given: dict[str, Tensor]) -> Errors:
    """Distances of the output and of all gradients of a divided mixer from those of one process."""
    from femixer.parallel import full_state_dict, own_tokens, parallelize

    dtype = layer.out_proj.weight.dtype
    x, weight = torch.randn(2, 3, TOKENS, DIM, dtype=dtype, generator=torch.Generator().manual_seed(1))
    alone = x.clone().requires_grad_()
    y = layer(alone, **given)
    (y * weight).sum().backward()
    assert alone.grad is not None
    expected = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in expected.values())
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    parallelize(layer, mesh)
    part = own_tokens(layer, x).requires_grad_()
    out = layer(part, **{name: own_tokens(layer, value) for name, value in given.items()})
    (out * own_tokens(layer, weight)).sum().backward()
    assert part.grad is not None
    errors = {
        "output": relative(out, own_tokens(layer, y), 0),
        "x": relative(part.grad, own_tokens(layer, alone.grad), 0),
    }
    held = full_state_dict(layer)
    assert set(held) == set(before)
    assert all(torch.equal(held[name], before[name]) for name in before)
    with torch.no_grad():
        for parameter in layer.parameters():  # a gradient is divided as its parameter is
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    for name, grad in full_state_dict(layer).items():
        errors[name] = relative(grad, expected[name], 1e-3 * largest)
    return errors


def mixers(ranks: int) -> Iterator[tuple[str, Callable[[], Errors]]]:
    from torch.distributed.device_mesh import init_device_mesh

    def case(kind: str, given: str, mesh: Any, dtype: torch.dtype, **options: Any) -> Callable[[], Errors]:
        return lambda: same_as_alone(mixer(kind, dtype, **options), mesh, GIVEN[given]())

    if ranks == 2:
        cp, tp = (init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("cp", "tp"))
        for kind in KINDS:
            for causal in (True, False):
                for given in ("nothing", "segments") if causal else ("mask", "segments"):
                    name = f"cp {kind}, {'causal' if causal else 'encoder'}, {given}"
                    yield name, case(kind, given, cp, torch.float64, causal=causal)
            yield f"cp {kind}, float32", case(kind, "segments", cp, torch.float32)
            yield f"cp {kind}, the mean alone", case(kind, "mask", cp, torch.float64, parts="")
            if kind != "softmax, bias":
                yield f"tp {kind}", case(kind, "segments", tp, torch.float64)
    else:
        cp = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        for kind in KINDS:
            yield f"cp {kind}, segments", case(kind, "segments", cp, torch.float64)
        for kind in ("softmax", "gla", "mamba"):
            yield f"cp {kind}, encoder", case(kind, "segments", cp, torch.float64, causal=False)
            yield f"cp and tp {kind}", case(kind, "segments", both, torch.float64)


# Language models


def language(priors: list[str], dtype: torch.dtype = torch.float32) -> Any:
    from femixer.models import FEMConfig, FEMForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": DIM, "intermediate_size": 34, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    config = FEMConfig(vocab_size=WORDS, prior=priors, tie_word_embeddings=True, **shape)
    return disturbed(FEMForCausalLM(config)).to(dtype)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Words and documents; every row has as many labels as any other."""
    words = torch.randint(WORDS, (4, TOKENS), generator=torch.Generator().manual_seed(step))
    return words, (torch.arange(TOKENS) >= 10 + step % 3).long().expand(4, -1)


def loss_of(model: Any, words: Tensor, documents: Tensor) -> Tensor:
    """The model's own loss; in float64 by hand, since transformers' is float32."""
    if next(model.parameters()).dtype == torch.float32:
        return model(words, segments=documents, labels=words, attention_mask=torch.ones_like(words)).loss
    from femixer.models.language import within_documents
    from femixer.parallel import own_tokens
    from femixer.parallel.exchange import summed

    labels = within_documents(words, documents).roll(-1, 1)
    labels[:, -1] = -100
    logits, own = model(words, segments=documents).logits, own_tokens(model, labels)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")
    loss = loss / (labels >= 0).sum()
    return loss if own.shape == labels.shape else summed(loss, model.cut.group)


def fit(model: Any, steps: int, rows: slice = slice(None)) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for step in range(steps):
        words, documents = batch(step)
        loss = loss_of(model, words[rows], documents[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained_as_alone(
    model: Callable[[], Any], mesh: Any, steps: int, shard: bool = False, checkpointing: bool = False
) -> Errors:
    """Distances of losses and final weights of a divided run from those of one process."""
    from torch import distributed

    from femixer.parallel import full_state_dict, load_full_state_dict, parallelize

    alone, divided = model(), parallelize(model(), mesh, shard=shard)
    if checkpointing:
        divided.gradient_checkpointing_enable()
        divided.train()
    expected = fit(alone, steps)
    rows = slice(None)
    if "dp" in mesh.mesh_dim_names:
        place = mesh["dp"].get_local_rank()
        rows = slice(2 * place, 2 * place + 2)
    losses = torch.tensor(fit(divided, steps, rows), dtype=torch.float64)
    if "dp" in mesh.mesh_dim_names:
        distributed.all_reduce(losses, group=mesh["dp"].get_group())
        losses /= mesh["dp"].size()
    errors = {"losses": relative(losses, torch.tensor(expected, dtype=torch.float64), 0)}
    state = full_state_dict(divided)
    wanted = alone.state_dict()
    assert set(state) == set(wanted)
    errors |= {name: relative(state[name], value, 0.1) for name, value in wanted.items()}
    again = parallelize(model(), mesh, shard=shard)
    load_full_state_dict(again, state)
    assert all(torch.equal(value, state[name]) for name, value in full_state_dict(again).items())
    return errors


def languages(ranks: int) -> Iterator[tuple[str, Callable[[], Errors]]]:
    from torch.distributed.device_mesh import init_device_mesh

    def case(priors: list[str], sizes: dict[str, int], steps: int, dtype: Any = torch.float32, **options: Any) -> Any:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return lambda: trained_as_alone(lambda: language(priors, dtype), mesh, steps, **options)

    if ranks == 2:
        yield "lm cp, float32", case(["softmax", "gla"], {"cp": 2}, STEPS)
        yield "lm cp", case(["mamba", "decay"], {"cp": 2}, STEPS, torch.float64)
        yield "lm tp", case(["softmax", "mamba"], {"tp": 2}, 5, torch.float64)
        yield "lm cp sharded", case(["softmax", "gla"], {"cp": 2}, 5, torch.float64, shard=True)
        yield "lm cp checkpointing", case(["softmax", "gla"], {"cp": 2}, 2, torch.float64, checkpointing=True)
    else:
        yield "lm cp tp", case(["softmax", "gla"], {"cp": 2, "tp": 2}, 5, torch.float64)
        yield "lm dp cp", case(["softmax", "ssm"], {"dp": 2, "cp": 2}, 5, torch.float64)
        yield "lm dp tp sharded", case(["softmax", "gla"], {"dp": 2, "tp": 2}, 5, torch.float64, shard=True)
        yield "lm cp tp sharded", case(["gla", "aft"], {"cp": 2, "tp": 2}, 5, torch.float64, shard=True)
        yield "lm dp cp sharded", case(["gla", "softmax"], {"dp": 2, "cp": 2}, 5, torch.float64, shard=True)


# Bytes


class Sent(TorchDispatchMode):
    """Bytes that this rank gives to exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            given = args[1] if "allgather" in str(func) else args[0]  # a gather writes to its first argument
            self.bytes += sum(x.nbytes for x in ([given] if isinstance(given, Tensor) else given))
        return func(*args, **(kwargs or {}))


def numbers(layer: FreeEnergyMixer) -> int:
    """docs/scaling.md: numbers of float64 that a stretch of one sequence gives to the exchange of its prior's state."""
    (key, value), heads, groups = layer.widths, layer.heads, layer.kv_heads
    prior: Any = layer.prior
    if layer.prior_name == "linear":
        return groups * (key * (2 * value + 1) + value) + 1
    if layer.prior_name == "gla":
        return groups * (key * (2 * value + 1) + value + prior.gates)
    if layer.prior_name in ("aft", "decay"):
        return 4 * heads * value
    if layer.prior_name == "mamba-interactive":
        return heads * (4 * prior.state_size + 1)
    return heads * value * (4 * prior.state_size + 1)


def sent(kind: str, tokens: int) -> list[int]:
    """Bytes that a rank gives in the forward pass on so many tokens per rank, and what the formula says."""
    from torch.distributed.device_mesh import init_device_mesh

    from femixer.parallel import parallelize

    layer, batch = mixer(kind, torch.float32), 3
    conditioner = 2 * layer.conditioner.channels  # type: ignore[union-attr]
    if kind == "softmax":
        stretches, of_prior = 2, 4 * batch * tokens * layer.kv_heads * sum(layer.widths)
    else:
        stretches, of_prior = 1, 8 * batch * numbers(layer)
    segments = 8 * 4 * batch * stretches + (8 * batch * tokens if kind == "softmax" else 0)
    parallelize(layer, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    found = []
    for given in ({}, {"segments": torch.zeros(batch, tokens, dtype=torch.long)}):
        with Sent() as counted, torch.no_grad():
            layer(torch.randn(batch, tokens, DIM), **given)
        found.append(counted.bytes)
    formula = of_prior + 8 * batch * stretches * conditioner
    return [*found, formula, formula + segments]


def sent_by_heads(tokens: int) -> list[int]:
    """The same of tensor parallelism, forwards and backwards."""
    from torch.distributed.device_mesh import init_device_mesh

    from femixer.parallel import parallelize

    layer, batch = mixer("gla", torch.float32), 3
    channels = layer.conditioner.channels  # type: ignore[union-attr]
    parallelize(layer, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    with Sent() as forwards:
        y = layer(torch.randn(batch, tokens, DIM, requires_grad=True))
    with Sent() as backwards:
        y.sum().backward()
    return [forwards.bytes, backwards.bytes, 4 * batch * tokens * DIM, 4 * batch * tokens * (DIM + channels)]


def traffic(ranks: int) -> Iterator[tuple[str, Callable[[], list[int]]]]:
    if ranks == 2:
        for kind in ("softmax", "linear", "gla", "gla, channel", "decay", "ssm", "mamba", "mamba-interactive"):
            for tokens in (4, 10):
                yield f"bytes {kind}, {tokens}", lambda kind=kind, tokens=tokens: sent(kind, tokens)  # type: ignore[misc]
        yield "bytes heads", lambda: sent_by_heads(5)


# Bad input


def refusals(ranks: int) -> Iterator[tuple[str, Callable[[], str]]]:
    from torch.distributed.device_mesh import init_device_mesh

    from femixer.models import FEMConfig, FEMForCausalLM
    from femixer.parallel import parallelize

    if ranks != 2:
        return
    meshes = {name: init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("cp", "tp", "rows")}

    def small(**options: Any) -> Any:
        shape = {"hidden_size": DIM, "intermediate_size": 34, "num_hidden_layers": 1, "num_attention_heads": HEADS}
        return FEMForCausalLM(FEMConfig(vocab_size=WORDS, **{**shape, **options}))

    words = torch.zeros(1, 7, dtype=torch.long)
    tries: dict[str, Callable[[], Any]] = {
        "dimensions": lambda: parallelize(small(), meshes["rows"]),
        "heads": lambda: parallelize(small(num_attention_heads=3), meshes["tp"]),
        "kv_heads": lambda: parallelize(small(num_key_value_heads=1), meshes["tp"]),
        "width": lambda: parallelize(small(intermediate_size=33), meshes["tp"]),
        "bias": lambda: parallelize(mixer("softmax, bias", torch.float32), meshes["tp"]),
        "length": lambda: parallelize(small(prior="gla"), meshes["cp"])(words),
        "zigzag": lambda: parallelize(small(), meshes["cp"])(words[:, :6]),
        "rival": lambda: parallelize(small(mixer="deltanet"), meshes["cp"]),
        "model": lambda: parallelize(nn.Linear(2, 2), meshes["cp"]),
        "twice": lambda: parallelize(parallelize(small(), meshes["cp"]), meshes["cp"]),
        "cache": lambda: parallelize(small(), meshes["cp"])(words[:, :4], use_cache=True),
        "state": lambda: parallelize(mixer("gla", torch.float32), meshes["cp"])(
            torch.zeros(1, 4, DIM), return_state=True
        ),
        "mesh": lambda: init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)),
    }
    for name, action in tries.items():
        yield f"refused {name}", lambda action=action: refusal(action)  # type: ignore[misc]


def refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return "nothing was refused"


# One rank


def attempt(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def process(folder: Path, rank: int, ranks: int) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    meeting, patience = f"file://{folder / f'meeting {ranks}'}", timedelta(seconds=120)
    distributed.init_process_group("gloo", meeting, patience, world_size=ranks, rank=rank)
    only = os.environ.get("ONLY", "")
    outcome = {name: attempt(action) for cases in CASES for name, action in cases(ranks) if only in name}
    (folder / f"{ranks} {rank}.json").write_text(json.dumps(outcome))
    distributed.destroy_process_group()


CASES: tuple[Callable[[int], Iterator[tuple[str, Callable[[], Any]]]], ...] = (mixers, languages, traffic, refusals)


# What came of it


def spawned(folder: Path, ranks: int, backend: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "FEMIXER_BACKEND": backend, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder)]
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(said)
    return [json.loads((folder / f"{ranks} {rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("parallel")
    return {ranks: spawned(folder, ranks, "plain") for ranks in (2, 4)}


def tolerance(name: str) -> float:
    """Features of linear attention may all be 1e-6: weights of 1e-12, whose float64 gradients have fewer digits."""
    if "float32" in name:
        return 1e-5
    return 1e-8 if "linear" in name or "gla" in name else 1e-10


@pytest.mark.parametrize(
    ("ranks", "what", "count"), [(2, "cp ", 72), (2, "tp ", 11), (4, "cp ", 18), (2, "lm ", 5), (4, "lm ", 5)]
)
def test_divided_over_ranks_all_is_as_in_one_process(outcomes, ranks: int, what: str, count: int) -> None:
    for outcome in outcomes[ranks]:
        found = {name: errors for name, errors in outcome.items() if name.startswith(what)}
        assert len(found) == count
        wrong = {}
        for name, errors in found.items():
            assert isinstance(errors, dict), f"{name}: {errors}"
            wrong |= {(name, at): error for at, error in errors.items() if not error <= tolerance(name)}
        assert not wrong


def test_bytes_are_those_of_the_formulas(outcomes) -> None:
    for outcome in outcomes[2]:
        found = {name: counted for name, counted in outcome.items() if name.startswith("bytes")}
        assert len(found) == 17
        for name, counted in found.items():
            assert counted[:2] == counted[2:], name
        for kind in ("linear", "gla", "mamba"):
            assert found[f"bytes {kind}, 4"] == found[f"bytes {kind}, 10"]  # whatever the length


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dimensions", "mesh has dimensions ('rows',); allowed are names among dp, cp, tp"),
        ("heads", "heads=3 cannot be divided among 2 ranks of 'tp'; allowed is a multiple"),
        ("kv_heads", "kv_heads=1 cannot be divided among 2 ranks of 'tp'; allowed is a multiple"),
        ("width", "intermediate_size=33 cannot be divided among 2 ranks of 'tp'; allowed is a multiple"),
        ("bias", "score_bias does not fit 'tp': it scores all heads at once"),
        ("length", "7 tokens cannot be cut into 2 equal stretches on 2 ranks; allowed is a multiple of 2"),
        ("zigzag", "6 tokens cannot be cut into 4 equal stretches on 2 ranks; allowed is a multiple of 4"),
        ("rival", "mixer=DeltaNet cannot be divided over 'cp' or 'tp'; choose fem"),
        ("model", "model is Linear; allowed is FreeEnergyMixer, FEMModel or FEMForCausalLM"),
        ("twice", "the model is divided over ranks already"),
        ("cache", "use_cache does not fit a sequence that is cut over ranks; leave it out"),
        ("state", "state and return_state do not fit a sequence that is cut over ranks"),
    ],
)
def test_what_cannot_be_divided_is_refused(outcomes, name: str, message: str) -> None:
    assert [outcome[f"refused {name}"] for outcome in outcomes[2]] == [message] * 2


def test_too_few_processes_are_refused(outcomes) -> None:
    assert all("4" in outcome["refused mesh"] and "2" in outcome["refused mesh"] for outcome in outcomes[2])


def stretch_states(seed: int) -> list[tuple[Tensor, ...]]:
    """Sums, exponentials, their tops and decays of five stretches, one of them empty and one with a new segment."""
    random = torch.Generator().manual_seed(seed)
    sums, energies = torch.rand(2, 5, 3, 7, 2, dtype=torch.float64, generator=random)
    top = 300 * torch.randn(5, 3, 1, 2, dtype=torch.float64, generator=random)
    decay = -20 * torch.rand(5, 3, 7, 1, dtype=torch.float64, generator=random)
    sums[1] = energies[1] = 0
    top[1], decay[3, 1] = -torch.inf, -torch.inf
    return [*zip(sums, energies, top, decay, strict=True)]


def joined(states: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    sums, energies, top, decay = (torch.stack(x) for x in zip(*states, strict=True))
    count = len(states)
    return carried_sums(sums, decay, count), *carried_energies(energies, top, decay, count), decay.sum(0)


@pytest.mark.parametrize("seed", range(3))
def test_combination_of_states_is_associative(seed: int) -> None:
    a, b, c, d, e = stretch_states(seed)
    at_once = joined([a, b, c, d, e])
    for stepwise in (
        joined([joined([joined([joined([a, b]), c]), d]), e]),
        joined([a, joined([b, joined([c, joined([d, e])])])]),
        joined([joined([a, b]), joined([c, d, e])]),
    ):
        sums, energies, top, decay = stepwise
        torch.testing.assert_close(sums, at_once[0], rtol=1e-13, atol=0)
        # The top is no larger than what it stands for and no part of it: compared are the exponentials themselves.
        torch.testing.assert_close(energies * (top - at_once[2]).exp(), at_once[1], rtol=1e-11, atol=0)
        torch.testing.assert_close(decay, at_once[3])


@pytest.mark.parametrize("seed", range(3))
def test_combination_of_reads_is_associative(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    states = 30 * torch.randn(4, 2, 3, 5, dtype=torch.float64, generator=random)
    states[1, 0] = torch.tensor([-torch.inf, 0, 0], dtype=torch.float64)[:, None]
    decay = -10 * torch.rand(4, 2, 5, dtype=torch.float64, generator=random)
    decay[2, 1] = -torch.inf
    beta = 0.3 + torch.rand(5, dtype=torch.float64, generator=random)
    at_once = carried_reads(states, decay, beta, 4)
    pairs = [carried_reads(states[i : i + 2], decay[i : i + 2], beta, 2) for i in (0, 2)]
    stepwise = carried_reads(torch.stack(pairs), torch.stack([decay[:2].sum(0), decay[2:].sum(0)]), beta, 2)
    torch.testing.assert_close(stepwise, at_once, rtol=1e-12, atol=1e-12)


if __name__ == "__main__":
    process(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
