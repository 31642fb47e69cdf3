"""What the test matrix shares: variants of every registered prior, mixers with every path in use, plain oracles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from femixer import FreeEnergyMixer, free_energy
from femixer.layout import Layout
from femixer.priors import PRIORS, Alibi, Prior

# One thread: the tests are many small tensors, and pytest runs them side by side.
torch.set_num_threads(1)

BATCH, LENGTH, DIM, HEADS = 3, 23, 24, 3
EXACT = 1e-10  # float64, different order of summation
ROUNDING = 2e-5  # float32, relative to the largest output

EVERY_PRIOR: dict[str, dict[str, Any]] = {
    "CLTG": {},
    "mean": {"parts": ""},
    "L": {"parts": "L"},
}
QUERIES_AND_KEYS: dict[str, dict[str, Any]] = {
    "grouped": {"kv_heads": 1},
}
OF_PRIOR: dict[str, dict[str, dict[str, Any]]] = {
    "linear": {"norope": {"rope": False}},
    "gla": {
        "scalar": {"kv_heads": 1, "prior_options": {"decay": "scalar"}},
        "channel": {"prior_options": {"decay": "channel"}},
        "channelL": {"parts": "L", "prior_options": {"decay": "channel"}},
    },
    "ssm": {"onemode": {"parts": "LT", "prior_options": {"state_size": 1}}},
    "mamba": {
        "states": {"parts": "L", "prior_options": {"state_size": 3, "rank": 2}},
        "unnormalized": {"prior_options": {"normalize": False}},
        "skip": {"prior_options": {"skip": True}},
    },
    "fox": {
        "groupedwindow": {"rope": False, "kv_heads": 1, "window": 6, "prior_options": {"cache": "exp"}},
    },
    "softmax": {
        "norope": {"rope": False},
        "balanced": {"budget": "balanced", "parts": "LT"},
        "window": {"window": 5},
        "windowmean": {"window": 4, "parts": "CG"},
        "expcache": {"prior_options": {"cache": "exp"}},
        "alibi": {"parts": "LTG", "prior_options": {"score_bias": Alibi(HEADS)}},
        "groupedwindow": {"kv_heads": 1, "window": 6, "prior_options": {"cache": "exp"}},
    },
}


@dataclass(frozen=True)
class Variant:
    prior: str
    name: str
    options: dict[str, Any] = field(hash=False)
    encodes, rounding = True, ROUNDING

    def build(
        self, dim: int = DIM, heads: int = HEADS, dtype: torch.dtype = torch.float64, **more: Any
    ) -> FreeEnergyMixer:
        m = FreeEnergyMixer(dim, heads, self.prior, dtype=dtype, **{**self.options, **more})
        return stir(m)


def _variants(prior: str) -> Iterator[Variant]:
    found = dict(EVERY_PRIOR)
    if PRIORS[prior].queries_and_keys:
        found |= QUERIES_AND_KEYS
    found |= OF_PRIOR.get(prior, {})
    for name, options in found.items():
        yield Variant(prior, name, options)


def variants(*names: str, priors: Sequence[str] = tuple(PRIORS), **options: Any) -> pytest.MarkDecorator:
    """Parametrize a test over all variants of all registered priors, or over those of these names; options: of each."""
    chosen = [v for prior in priors for v in _variants(prior) if not names or v.name in names]
    chosen = [Variant(v.prior, v.name, {**v.options, **options}) for v in chosen]
    return pytest.mark.parametrize("variant", [pytest.param(v, id=f"{v.prior}-{v.name}") for v in chosen])


def stir(m: FreeEnergyMixer, seed: int = 7) -> FreeEnergyMixer:
    """Random parameters, so that nothing is zero or the same in every channel."""
    with torch.no_grad():
        for index, (name, parameter) in enumerate(m.named_parameters()):
            random = 0.3 * noise(*parameter.shape, seed=100 * seed + index, dtype=parameter.dtype)
            if name.endswith(("weight", "_map")):
                parameter.copy_(random)
            else:
                parameter.add_(random)
    return m


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tokens(
    batch: int = BATCH, length: int = LENGTH, dim: int = DIM, dtype: torch.dtype = torch.float64, seed: int = 1
) -> Tensor:
    return noise(batch, length, dim, seed=seed, dtype=dtype)


# Left padding, right padding, holes and one row without any.
MASK = torch.ones(4, LENGTH, dtype=torch.bool)
MASK[0, :9] = False
MASK[1, -8:] = False
MASK[2, [0, 3, 4, 5, 11, 12, 13, 14, 15, 16, 21, 22]] = False

# Holes inside and between segments, ids that come back, segments of one token, leading and trailing padding.
SEGMENTS = torch.tensor(
    [
        [-1, -1, -1, 4, 4, 4, -1, 4, 4, 4, 4, 9, 9, 9, 9, 9, 9, -1, -1, 2, 2, 2, 2],
        [5, 5, 5, 5, 5, 5, 0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5, 0, 0, 0, 0, 0],
        [7, -3, 7, 7, 1, -1, -1, 7, 6, 7, 7, 7, 7, 7, -1, -1, -1, 7, 7, 3, -1, -2, -1],
    ]
)


def segments_of(ids: list[int]) -> list[list[int]]:
    """Indices of each segment's tokens: a change of id between real tokens starts one, negative ids are skipped."""
    found: list[list[int]] = []
    last = None
    for index, identity in enumerate(ids):
        if identity < 0:
            continue
        if identity != last:
            found.append([])
        found[-1].append(index)
        last = identity
    return found


def separately(m: FreeEnergyMixer, x: Tensor, ids: Tensor) -> Tensor:
    """Every segment of every row alone, put back in its place; zero where there is padding."""
    y = x.new_zeros(x.shape)
    for row, row_ids in enumerate(ids.tolist()):
        for index in segments_of(row_ids):
            y[row, index] = m(x[row, index][None])[0]
    return y


def streamed(m: FreeEnergyMixer, x: Tensor, sizes: list[int], **layout: Tensor) -> Tensor:
    """The same tokens in chunks of these sizes, one after the other; layout: mask or segments."""
    assert sum(sizes) == x.shape[1]
    state, outputs, start = None, [], 0
    for size in sizes:
        here = slice(start, start + size)
        part = {name: value[:, here] for name, value in layout.items()}
        y, state = m(x[:, here], state=state, return_state=True, **part)
        outputs.append(y)
        start += size
    return torch.cat(outputs, 1)


def outcome(m: FreeEnergyMixer, forward: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of a random functional of it in x and every parameter."""
    x = x.detach().clone().requires_grad_()
    y = forward(x)
    names, parameters = zip(*m.named_parameters(), strict=True)
    gradients = torch.autograd.grad((y * noise(*y.shape, seed=3, dtype=y.dtype)).sum(), [x, *parameters])
    return {"y": y.detach(), "d x": gradients[0], **{f"d {n}": g for n, g in zip(names, gradients[1:], strict=True)}}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Each tensor within tolerance of the other, relative to its largest entry."""
    assert actual.keys() == expected.keys()
    for name, a in actual.items():
        b = expected[name]
        assert a.shape == b.shape
        if a.numel():
            error = (a.double() - b.double()).abs().max().item()
            allowed = tolerance * max(1.0, b.abs().max().item())
            assert error <= allowed, f"{name}: differs by {error:.2e}, allowed {allowed:.2e}"


def assert_gradient(name: str, actual: Tensor, expected: Tensor, size: Tensor, beta: Tensor, length: int) -> None:
    """In float32 relative to the gradient, and to the terms of order v / beta whose difference it is. size: largest |v|
    of what each temperature reads."""
    eps = torch.finfo(torch.float32).eps
    error, scale = (actual - expected).abs().max().item(), expected.abs().max().item()
    tolerance = max(1e-4, 8 * eps * (beta * size).max().item())
    terms = {"v": 1.0, "beta": length * (size / beta).max().item()}.get(name.split(",")[0], size.max().item())
    allowed = tolerance * scale + 8 * eps * max(1.0, terms)
    assert error <= allowed, f"d {name}: {error:.1e} of {scale:.1e}, allowed {allowed:.1e}"


def reads_of(p: Tensor, v: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The definition: mean and free energy [B, T, H, D] of v [B, S, G, D] under p [B, H, T, S] or [B, H, T, S, D]."""
    repeats = p.shape[1] // v.shape[2]
    v = v.repeat_interleave(repeats, 2).transpose(1, 2)
    mean = (p * v[:, :, None] if p.dim() == 5 else p[..., None] * v[:, :, None]).sum(-2)
    if beta is None:
        return mean.transpose(1, 2), None
    free = free_energy(p, v, beta.repeat_interleave(repeats, 0)[:, None])
    return mean.transpose(1, 2), free.transpose(1, 2)


def oracle(
    prior: Prior, inputs: dict[str, Tensor], v: Tensor, beta: Tensor | None, layout: Layout, rows: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """prior.read by its definition, in float64 on prior.weights, for some rows."""
    p = prior.weights(inputs, layout, rows, torch.float64)
    return reads_of(p, prior.over_index(v.double()), None if beta is None else beta.double())


def plain_mixer(m: FreeEnergyMixer, x: Tensor, dtype: torch.dtype = torch.float64, **given: Tensor) -> Tensor:
    """The mixer from its definition in plain torch: dense weights, sums, logarithm, gates; `dtype` is that of the
    weights; given: mask or segments.

    Values of order one only: nothing is shifted.
    """
    projected, layout = m.prepare(x, **given)
    p = m.prior.weights(projected.inputs, layout, None, dtype)
    p = p.expand(x.shape[0], *p.shape[1:])
    v = m.prior.over_index(projected.v).repeat_interleave(m.heads // m.kv_heads, 2)
    average = "bhtsd,bshd->bthd" if p.dim() == 5 else "bhts,bshd->bthd"
    read = torch.einsum(average, p, v.to(p.dtype))
    if "L" in m.parts:
        beta = m.beta_max
        mean, read = read, torch.einsum(average, p, (beta * v).exp().to(p.dtype)).log() / beta
        if "T" in m.parts:
            lam = projected.lam.sigmoid()
            read = (1 - lam) * mean + lam * read
    if "G" in m.parts:
        read = read * plain_gate(projected.gate)
    y = m.out_proj(read.flatten(-2).to(x.dtype))
    return y if layout.padding is None else y.masked_fill(layout.padding[..., None], 0)


def plain_gate(logits: Tensor) -> Tensor:
    gate = F.softplus(logits)
    return gate / (gate.square().mean(-1, keepdim=True) + 1e-6).sqrt()
