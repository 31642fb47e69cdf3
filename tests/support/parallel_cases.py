"""What ranks do in test_parallel.py, `process` in each of four; ONLY=words in the environment takes cases by name.

They are connected through gloo. Every rank computes the result of one process itself and writes down how far its part
of the divided one is away, or what an error said.
"""

import json
import os
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from parallel_layers import (
    DIM,
    GIVEN,
    HEADS,
    KINDS,
    PAIRS,
    RANKS,
    STEPS,
    TOKENS,
    WORDS,
    Errors,
    disturbed,
    meshes,
    mixer,
    relative,
)
from parallel_traffic import traffic
from torch import Tensor, nn

from femixer import FreeEnergyMixer


def same_as_alone(layer: FreeEnergyMixer, mesh: Any, given: dict[str, Tensor], ring: bool | None = None) -> Errors:
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
    parallelize(layer, mesh, ring=ring)
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
        cp, tp = PAIRS["cp"], PAIRS["tp"]
        for kind in KINDS:
            for causal in (True, False):
                for given in ("nothing", "segments") if causal else ("mask", "segments"):
                    name = f"cp {kind}, {'causal' if causal else 'encoder'}, {given}"
                    yield name, case(kind, given, cp, torch.float64, causal=causal)
            yield f"cp {kind}, float32", case(kind, "segments", cp, torch.float32)
            yield f"cp {kind}, the mean alone", case(kind, "mask", cp, torch.float64, parts="")
            if kind != "softmax, bias":
                yield f"tp {kind}", case(kind, "segments", tp, torch.float64)
        yield "tp gla, scalar", case("gla", "segments", tp, torch.float64, prior_options={"decay": "scalar"})
        other: dict[str, Any] = {"start": "prior", "readout": "posterior_mean"}
        skip = {"prior_options": {"state_size": 3, "skip": True}}
        for kind, more in (("softmax", other), ("gla", other), ("mamba", {**other, **skip})):
            yield f"cp {kind}, readout", case(kind, "segments", cp, torch.float64, **more)
            yield f"tp {kind}, readout", case(kind, "segments", tp, torch.float64, **more)
    else:
        cp = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        for kind in KINDS:
            yield f"cp {kind}, segments", case(kind, "segments", cp, torch.float64)
        for kind in ("softmax", "gla", "mamba"):
            yield f"cp {kind}, encoder", case(kind, "segments", cp, torch.float64, causal=False)
            yield f"cp and tp {kind}", case(kind, "segments", both, torch.float64)


def rings(ranks: int) -> Iterator[tuple[str, Callable[[], Errors]]]:
    """Keys and values of softmax layers going around instead of being gathered."""
    from torch.distributed.device_mesh import init_device_mesh

    def case(given: str, dtype: torch.dtype, outlier: float = 1, **options: Any) -> Callable[[], Errors]:
        def run() -> Errors:
            layer = mixer("softmax", dtype, **options)
            with torch.no_grad():  # of values: sums of exponentials are then out of range, and heads are read again
                layer.value_proj.linear.weight[: 2 * layer.widths.value] *= outlier
            return same_as_alone(layer, mesh, GIVEN[given](), ring=True)

        return run

    mesh = PAIRS["cp"] if ranks == 2 else init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    for given in GIVEN:
        yield f"ring causal, {given}", case(given, torch.float64)
        yield f"ring encoder, {given}", case(given, torch.float64, causal=False)
    yield "ring float32", case("segments", torch.float32)
    yield "ring the mean alone", case("mask", torch.float64, parts="")
    yield "ring large values", case("segments", torch.float64, 1000.0)


# Language models


def language(priors: list[str], dtype: torch.dtype = torch.float32) -> Any:
    from femixer.models import FEMConfig, FEMForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": DIM, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": HEADS}
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
    from femixer.parallel.cut import summed

    labels = within_documents(words, documents).roll(-1, 1)
    labels[:, -1] = -100
    logits, own = model(words, segments=documents).logits, own_tokens(model, labels)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")
    loss = loss / (labels >= 0).sum()
    return loss if own.shape == labels.shape else summed(loss, model.cut.group)


def fit(model: Any, steps: int, rows: slice = slice(None), optimizer: Any = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02) if optimizer is None else optimizer
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
    batches = [name for name in mesh.mesh_dim_names if name.startswith("dp")]
    if checkpointing:
        divided.gradient_checkpointing_enable()
        divided.train()
    expected = fit(alone, steps)
    rows = slice(None)
    for name in batches:  # each halves or quarters the four rows
        start, stop, _ = rows.indices(4)
        count = (stop - start) // mesh[name].size()
        start += count * mesh[name].get_local_rank()
        rows = slice(start, start + count)
    losses = torch.tensor(fit(divided, steps, rows), dtype=torch.float64)
    for name in batches:
        distributed.all_reduce(losses, group=mesh[name].get_group())
        losses /= mesh[name].size()
    errors = {"losses": relative(losses, torch.tensor(expected, dtype=torch.float64), 0)}
    state = full_state_dict(divided)
    wanted = alone.state_dict()
    assert set(state) == set(wanted)
    errors |= {name: relative(state[name], value, 0.1) for name, value in wanted.items()}
    again = parallelize(model(), mesh, shard=shard)
    load_full_state_dict(again, state)
    assert all(torch.equal(value, state[name]) for name, value in full_state_dict(again).items())
    return errors


def resumed_as_alone(folder: Path) -> Errors:
    """Distances after a checkpoint of one process, with AdamW's state, was taken up by two that divide the heads."""
    from torch import distributed

    from femixer.parallel import full_state_dict, parallelize
    from femixer.training import adamw, checkpoint

    place = folder / f"alone {distributed.get_rank()}"
    alone, divided = language(["gla", "mamba"], torch.float64), language(["gla", "mamba"], torch.float64)
    optimizer = adamw(alone, 1e-2, 0.1)
    fit(alone, 2, optimizer=optimizer)
    checkpoint.save(place, alone, optimizer, checkpoint.Position(2, 0.0))
    parallelize(divided, PAIRS["tp"])
    other = adamw(divided, 1e-2, 0.1)
    assert checkpoint.restore(place, divided, other).step == 2
    expected, losses = (
        torch.tensor(fit(model, 3, optimizer=of), dtype=torch.float64)
        for model, of in ((alone, optimizer), (divided, other))
    )
    state = full_state_dict(divided)
    errors = {name: relative(state[name], value, 0.1) for name, value in alone.state_dict().items()}
    return {**errors, "losses": relative(losses, expected, 0)}


def languages(ranks: int) -> Iterator[tuple[str, Callable[[], Errors]]]:
    from torch.distributed.device_mesh import init_device_mesh

    def case(priors: list[str], sizes: dict[str, int], steps: int, dtype: Any = torch.float32, **options: Any) -> Any:
        if ranks == 2:
            mesh = PAIRS[next(iter(sizes))]
        else:
            mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return lambda: trained_as_alone(lambda: language(priors, dtype), mesh, steps, **options)

    def by_accelerate(**sizes: int) -> Any:
        from accelerate.parallelism_config import ParallelismConfig

        mesh = ParallelismConfig(**sizes).build_device_mesh("cpu")
        return lambda: trained_as_alone(lambda: language(["softmax", "gla"], torch.float64), mesh, 5)

    if ranks == 2:
        yield "lm cp, float32", case(["softmax", "gla"], {"cp": 2}, STEPS)
        yield "lm cp", case(["mamba", "decay"], {"cp": 2}, STEPS, torch.float64)
        yield "lm tp", case(["softmax", "mamba"], {"tp": 2}, 5, torch.float64)
        yield "lm cp sharded, float32", case(["softmax", "gla"], {"cp": 2}, 5, shard=True)
        yield "lm cp checkpointing", case(["softmax", "gla"], {"cp": 2}, 2, torch.float64, checkpointing=True)
    else:
        yield "lm cp tp", case(["softmax", "gla"], {"cp": 2, "tp": 2}, 5, torch.float64)
        yield "lm dp cp", case(["softmax", "ssm"], {"dp": 2, "cp": 2}, 5, torch.float64)
        yield "lm dp tp sharded", case(["softmax", "gla"], {"dp": 2, "tp": 2}, 5, torch.float64, shard=True)
        yield "lm cp tp sharded", case(["gla", "aft"], {"cp": 2, "tp": 2}, 5, torch.float64, shard=True)
        yield "lm by accelerate, copied and sharded", by_accelerate(dp_replicate_size=2, dp_shard_size=2)
        yield "lm by accelerate, sharded and cut", by_accelerate(dp_shard_size=2, cp_size=2)
        yield "lm dp cp sharded", case(["gla", "softmax"], {"dp": 2, "cp": 2}, 5, torch.float64, shard=True)


def planned_by_transformers(folder: Path) -> Errors:
    """Mixers, MLPs and vocabulary by from_pretrained's tp_plan="auto": logits, what is generated, gradients."""
    from torch import distributed
    from transformers.distributed import DistributedConfig

    from femixer.models import FEMForCausalLM

    alone = language(["softmax", "gla"])
    if distributed.get_rank() == 0:
        alone.save_pretrained(folder / "planned")
    distributed.barrier()
    plan = DistributedConfig(tp_plan="auto", tp_size=4)
    divided = FEMForCausalLM.from_pretrained(folder / "planned", distributed_config=plan)
    block: Any = divided.model.layers[0]
    for weight in (block.mlp.gate_proj.weight, block.mixer.prior_proj.q.weight, block.mixer.raw_beta):
        assert weight.to_local().shape[0] * 4 == weight.shape[0]
    words, _ = batch(0)
    generated = [model.generate(words[:, :5], max_new_tokens=6, do_sample=False) for model in (alone, divided)]
    assert torch.equal(*generated)
    for model in (alone, divided):
        model(words, labels=words).loss.backward()
    grad, wanted = (model.model.layers[0].mixer.out_proj.weight.grad for model in (divided, alone))
    with torch.no_grad():
        return {
            "logits": relative(divided(words).logits, alone(words).logits, 0),
            "gradient": relative(grad.full_tensor(), wanted, 0),
        }


# Bad input


def refusals(ranks: int) -> Iterator[tuple[str, Callable[[], str]]]:
    from torch.distributed.device_mesh import init_device_mesh

    from femixer.models import FEMConfig, FEMForCausalLM
    from femixer.parallel import parallelize

    if ranks != 2:
        return

    def small(**options: Any) -> Any:
        shape = {"hidden_size": DIM, "intermediate_size": 36, "num_hidden_layers": 1, "num_attention_heads": HEADS}
        return FEMForCausalLM(FEMConfig(vocab_size=WORDS, **{**shape, **options}))

    words = torch.zeros(1, 7, dtype=torch.long)
    tries: dict[str, Callable[[], Any]] = {
        "dimensions": lambda: parallelize(small(), PAIRS["rows"]),
        "heads": lambda: parallelize(small(num_attention_heads=3), PAIRS["tp"]),
        "kv_heads": lambda: parallelize(small(num_key_value_heads=1), PAIRS["tp"]),
        "width": lambda: parallelize(small(intermediate_size=33), PAIRS["tp"]),
        "bias": lambda: parallelize(mixer("softmax, bias", torch.float32), PAIRS["tp"]),
        "length": lambda: parallelize(small(prior="gla"), PAIRS["cp"])(words),
        "zigzag": lambda: parallelize(small(), PAIRS["cp"])(words[:, :6]),
        "rival": lambda: parallelize(small(mixer="deltanet"), PAIRS["cp"]),
        "model": lambda: parallelize(nn.Linear(2, 2), PAIRS["cp"]),
        "twice": lambda: parallelize(parallelize(small(), PAIRS["cp"]), PAIRS["cp"]),
        "cache": lambda: parallelize(small(), PAIRS["cp"])(words[:, :4], use_cache=True),
        "state": lambda: parallelize(mixer("gla", torch.float32), PAIRS["cp"])(
            torch.zeros(1, 4, DIM), return_state=True
        ),
        "saving": lambda: parallelize(small(), PAIRS["tp"]).save_pretrained("nowhere"),
        "mesh": lambda: init_device_mesh("cpu", (8,), mesh_dim_names=("cp",)),
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


CASES: tuple[Callable[[int], Iterator[tuple[str, Callable[[], Any]]]], ...] = (
    mixers,
    rings,
    languages,
    traffic,
    refusals,
)


def process(folder: Path, rank: int) -> None:
    """All cases of four ranks, and those of two that fall to this pair."""
    from torch import distributed

    torch.set_num_threads(1)
    meeting, patience = f"file://{folder / 'meeting'}", timedelta(seconds=120)
    distributed.init_process_group("gloo", meeting, patience, world_size=RANKS, rank=rank)
    PAIRS.update(meshes())
    only, outcome = os.environ.get("ONLY", ""), {}
    for ranks in (2, RANKS):
        found = [(name, action) for cases in CASES for name, action in cases(ranks) if only in name]
        if ranks == 2:
            found += [("resumed", lambda: resumed_as_alone(folder))] if only in "resumed" else []
            found = found[rank // 2 :: 2]
        elif only in "transformers":
            found.append(("transformers, float32", lambda: planned_by_transformers(folder)))
        outcome[ranks] = {name: attempt(action) for name, action in found}
    (folder / f"{rank}.json").write_text(json.dumps(outcome))
    distributed.destroy_process_group()
