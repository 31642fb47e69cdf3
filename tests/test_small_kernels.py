"""Compiled kernels for small models: short softmax reads, the conditioner, few features, norms; against float64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from matrix import assert_close, noise, stir
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from femixer import FreeEnergyMixer, conditioner, projection, rotary
from femixer.conditioner import NormalizedLinear, TimeDecayConditioner
from femixer.gates import gated_read
from femixer.kernels import backend, short
from femixer.kernels.gated_softmax import GatedSoftmax, serves
from femixer.kernels.softmax import softmax_read
from femixer.layout import Past, arrange
from femixer.models.norm import RMSNorm
from femixer.priors import softmax as softmax_prior
from femixer.rotary import Turn, rotated

GRADIENTS = ("q", "k", "v", "beta")


@pytest.fixture(autouse=True)
def _compiled():
    assert backend.compiled(torch.empty(1)), "these tests are about the compiled kernels: is numba installed?"


def read_by_definition(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, causal: bool, runs: tuple[Tensor, Tensor] | None):
    """mu and F in float64 from all weights; zero where a row sees nothing."""
    repeats, (t, s) = q.shape[2] // k.shape[2], (q.shape[1], k.shape[1])
    k, v, beta = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2), beta.repeat_interleave(repeats, 0)
    seen = torch.ones(q.shape[0], 1, t, s, dtype=torch.bool)
    if causal:
        seen = seen & (torch.arange(s) <= torch.arange(s - t, s)[:, None])
    if runs is not None:
        seen = seen & (runs[0][:, None, :, None] == runs[1][:, None, None, :]) & (runs[0] >= 0)[:, None, :, None]
    scores = torch.einsum("bthe,bshe->bhts", q, k) * q.shape[-1] ** -0.5
    log_p = scores.masked_fill(~seen, -torch.inf).log_softmax(-1).nan_to_num(0.0, neginf=-1e30)
    empty = ~seen.any(-1).transpose(1, 2)[..., None]
    p = log_p.exp().masked_fill(~seen, 0)
    exponents = log_p.permute(0, 2, 3, 1)[..., None] + (beta * v)[:, None]
    free = exponents.masked_fill(~seen.permute(0, 2, 3, 1)[..., None], -1e30).logsumexp(2) / beta
    return torch.einsum("bhts,bshd->bthd", p, v), free.masked_fill(empty, 0)


# T, S, H, G, E, D, size of the values, causal: prime lengths, grouped heads, a chunk of a longer sequence, one token,
# more pairs of sequence and head than lanes, values whose exponentials underflow.
READS = [
    (23, 23, 4, 2, 6, 5, 1.0, True),
    (7, 13, 3, 3, 8, 4, 30.0, True),
    (11, 11, 2, 1, 8, 4, 0.1, False),
    (1, 1, 1, 1, 2, 1, 1.0, True),
    (3, 3, 13, 13, 2, 3, 1.0, False),
    (23, 23, 2, 2, 8, 4, 5000.0, True),
]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", READS, ids=str)
def test_short_read_and_its_gradients_are_the_definitions(case, padded):
    t, s, heads, groups, e, d, size, causal = case
    inputs = [noise(3, t, heads, e), noise(3, s, groups, e, seed=1), size * noise(3, s, groups, d, seed=2)]
    inputs.append(0.05 + 2 * torch.rand(groups, d, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    inputs = [x.float() for x in inputs]
    runs = None
    if padded:
        run = torch.randint(-1, 2, (3, s), generator=torch.Generator().manual_seed(4)).sort(1).values
        run[2] = -1
        runs = (run[:, s - t :], run)
    weights = noise(2, 3, t, heads, d, seed=5)
    results = []
    for dtype in (torch.float64, torch.float32):
        q, k, v, beta = (x.to(dtype).requires_grad_() for x in inputs)
        if dtype == torch.float64:
            reads = read_by_definition(q, k, v, beta, causal, runs)
        else:
            reads = softmax_read(q, k, v, beta, causal=causal, runs=runs)
        loss = sum((w.to(dtype) * x).sum() for w, x in zip(weights, reads, strict=True))
        grads = torch.autograd.grad(loss, (q, k, v, beta))
        results.append((dict(zip(("mean", "free"), reads, strict=True)), dict(zip(GRADIENTS, grads, strict=True))))
    assert_close(results[1][0], results[0][0], 2e-6)
    for name, exact in results[0][1].items():
        scale = max(float(exact.abs().max()), 1e-30)
        assert_close({name: results[1][1][name] / scale}, {name: exact / scale}, 5e-5)


def test_short_reads_are_the_long_ones(monkeypatch):
    """Either kernel may serve a sequence; which one does must not show."""
    q, k, v = (noise(2, 29, 4, w, seed=w, dtype=torch.float32) for w in (8, 9, 5))
    k, beta = k[..., :8].contiguous(), torch.rand(4, 5) + 0.5
    served = []
    monkeypatch.setattr(short, "read", lambda *a, read=short.read: served.append(1) or read(*a))
    quick = softmax_read(q, k, v, beta)
    monkeypatch.setattr(short, "LENGTH", 28)
    slow = softmax_read(q, k, v, beta)
    assert served == [1]
    assert_close(dict(zip("mf", quick, strict=True)), dict(zip("mf", slow, strict=True)), 1e-6)


def test_what_is_not_finite_shows():
    q, k, v = (noise(1, 5, 2, 4, seed=seed, dtype=torch.float32) for seed in range(3))
    k[0, 2, 0, 1] = torch.nan
    mean, free = softmax_read(q, k, v, torch.ones(2, 4))
    assert mean[0, 2:, 0].isnan().all() and mean[0, :2, 0].isfinite().all() and mean[0, :, 1].isfinite().all()
    assert free is not None and free[0, 2:, 0].isnan().all() and free[0, :, 1].isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("values", "inverse", "again"),
    [(1.0, 1.95, ""), (0.01, 1.95, ""), (300.0, 3.0, "causal"), (200.0, 0.02, "causal, encoder"), (0.0, 5.0, "")],
    ids=["plain", "narrow", "far apart", "cold", "all alike"],
)
@pytest.mark.parametrize(("batch", "length", "channels"), [(3, 71, 17), (1, 256, 16), (2, 5, 18)])
def test_a_gated_read_and_its_gradients_are_the_definitions(batch, length, channels, values, inverse, again, causal):
    """Read and gates at once, in float32, and one after the other in float64; `again`: where some heads cannot be read
    in one pass, because rows do not see the largest value or beta is small."""
    heads = 2
    q, k = (noise(batch, length, heads, 2 * channels, seed=seed) for seed in (0, 1))
    v, lam, gate = (noise(batch, length, heads, channels, seed=seed) for seed in (2, 3, 4))
    v[:, :, 0] *= values  # the other head is an ordinary one
    beta = torch.ones(heads, channels).double()
    beta[0] = inverse
    q, k, v, lam, gate, beta = (t.float().double() for t in (q, k, v, lam, gate, beta))
    weights, results, made = noise(batch, length, heads, channels, seed=5), [], []
    for dtype in (torch.float64, torch.float32):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v, beta, lam, gate)]
        if dtype == torch.float64:
            read = gated_read(*read_by_definition(*leaves[:4], causal, None), *leaves[4:])
        else:
            assert serves(heads, 2 * channels, *(leaves[n] for n in (2, 4, 5)))
            read, *made = GatedSoftmax.apply(*leaves, causal, (2 * channels) ** -0.5, 1e-6)
        results.append((read, *torch.autograd.grad((read * weights.to(dtype)).sum(), leaves)))
    assert bool(made[4].numel()) == (("causal" if causal else "encoder") in again) or length == 5
    for exact, fast in zip(*results, strict=True):
        scale = max(exact.detach().abs().max().item(), 1.0)
        assert_close({"x": fast / scale}, {"x": exact / scale}, 2e-5)


def test_a_gated_read_is_the_read_with_the_gates_after_it(monkeypatch):
    """In mixers: the same numbers, whichever way they are made."""
    mixer, x = stir(FreeEnergyMixer(64, 2)), noise(3, 71, 64, dtype=torch.float32)
    wanted, calls = mixer(x), []
    monkeypatch.setattr(softmax_prior, "serves", lambda *_: calls.append(1))
    assert_close({"y": mixer(x)}, {"y": wanted}, 1e-6)
    assert calls


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("given", ["nothing", "mask", "segments"])
@pytest.mark.parametrize(("length", "dim", "channels"), [(37, 13, 4), (70, 5, 9), (1, 8, 1)])
def test_the_conditioner_and_its_gradients_are_plain_torch_s(length, dim, channels, given, causal):
    """Compiled in float32 and plain in float64, also of the state that goes in and of the one that comes out."""
    generator = torch.Generator().manual_seed(length)
    x, state, weights = noise(3, length, dim), noise(3, channels, seed=1), noise(3, length, channels, seed=2)
    x = (x + 3).float().double() if given == "nothing" else x  # what is normalized may lie away from zero
    mask = torch.rand(3, length, generator=generator) > 0.3 if given == "mask" else None
    segments = torch.randint(-1, 3, (3, length), generator=generator).sort(1).values if given == "segments" else None
    made = TimeDecayConditioner(dim, channels, causal)
    torch.nn.init.normal_(made.in_proj.weight, generator=generator)
    results = []
    for dtype in (torch.float64, torch.float32):
        conditioner = copy.deepcopy(made).to(dtype)
        leaves = [*(t.to(dtype, copy=True).requires_grad_() for t in (x, state)), *conditioner.parameters()]
        layout, _ = arrange(leaves[0], mask, segments, Past())
        features, last = conditioner(leaves[0], layout, leaves[1])
        loss = (features * weights.to(dtype)).sum() + (last * state.to(dtype)).sum()
        results.append([features.detach(), last.detach(), *torch.autograd.grad(loss, leaves)])
    for exact, fast in zip(*results, strict=True):
        scale = max(float(exact.abs().max()), 1e-30)
        assert_close({"x": fast / scale}, {"x": exact / scale}, 1e-5)


@pytest.mark.parametrize(
    ("rows", "widths", "channels", "scaled"),
    [(7, (5,), 1, 5), (1031, (4, 5, 4), 4, 9), (3, (6,), 8, 0), (257, (3, 7, 5), 11, 10)],
)
def test_modulation_and_its_gradients_are_the_definitions(monkeypatch, rows, widths, channels, scaled):
    monkeypatch.setattr(projection, "NUMBERS", 1000)  # many features go through several stretches of rows
    width = sum(widths)
    x, f, m = noise(1, rows, width), noise(1, rows, channels, seed=1), noise(width, channels, seed=2)
    weights, results = noise(1, rows, width, seed=3), []
    for dtype in (torch.float64, torch.float32):
        x, f, m = leaves = [t.to(dtype).requires_grad_() for t in (x, f, m)]
        if dtype == torch.float64:
            eta = f @ m.mT
            y = torch.cat([(x * (1 + eta))[..., :scaled], (x + eta)[..., scaled:]], -1)
        else:
            y = torch.cat(projection.Modulate.apply(*leaves, scaled, widths), -1)
        results.append((y, *torch.autograd.grad((y * weights.to(dtype)).sum(), leaves)))
    for exact, fast in zip(*results, strict=True):
        assert_close({"x": fast}, {"x": exact}, 3e-6)


@pytest.mark.parametrize(
    ("rows", "widths", "channels", "scaled", "bias"),
    [(7, (5,), 1, 5, True), (1031, (4, 5, 3, 6), 6, 12, True), (3, (6, 1), 8, 0, False), (130, (67, 53), 5, 120, True)],
)
def test_projections_and_their_gradients_are_the_definitions(rows, widths, channels, scaled, bias):
    """Of a small model that is trained: products and modulation in one function. Every third column of the matrix makes
    factors 1 + eta of zero, or close to it, by one feature, and every third by all of them."""
    first, width = widths[0], sum(widths)
    x, f = noise(2, rows, 11), noise(2, rows, channels, seed=1)
    f[..., 0] = 1
    f[..., 1:] *= 1e-4
    weight, b, m = noise(width, 11, seed=2), noise(width, seed=3), noise(width, channels, seed=4)
    m[::3] = 0
    m[::3, 0] = torch.tensor([0, 1e-7, 3e-6, 1e-3]).double().repeat(width)[: len(m[::3])] - 1
    m[1::3, 0] = -1
    m[2::3, 1:] *= 1e4
    x, f, weight, b, m = (t.float().double() for t in (x, f, weight, b, m))
    weights, results = noise(2, rows, width, seed=5), []
    for dtype in (torch.float64, torch.float32):
        x, f, weight, b, m = leaves = [t.detach().to(dtype).requires_grad_() for t in (x, f, weight, b, m)]
        if dtype == torch.float64:
            y, eta = F.linear(x, weight, b if bias else None), f @ m.mT
            y = torch.cat([(y * (1 + eta))[..., :scaled], (y + eta)[..., scaled:]], -1)
        else:
            parts = [(weight[at], b[at] if bias else None, m[at]) for at in _halves(first, len(widths))]
            sizes = [(-1, 1)] * (len(widths) - 1) + [(-1,)]
            pieces = projection.Project.apply(x, f, scaled, list(widths), sizes, *(t for p in parts for t in p))
            y = torch.cat([piece.flatten(2) for piece in pieces[:-1]], -1)
        wanted = leaves if bias else [x, f, weight, m]
        results.append((y, *torch.autograd.grad((y * weights.to(dtype)).sum(), wanted)))
    for exact, fast in zip(*results, strict=True):
        scale = exact.detach().abs().max().item()
        assert_close({"x": fast / scale}, {"x": exact / scale}, 3e-6)


def _halves(first, pieces):
    """Columns of one projection, or of two."""
    return [slice(None)] if pieces == 1 else [slice(0, first), slice(first, None)]


def test_projections_that_are_watched_or_adapted_are_called_as_modules():
    """Hooks see what the linear maps make of x, and an adapter's own map is used."""
    mixer, x = stir(FreeEnergyMixer(32, 2)), noise(2, 9, 32, dtype=torch.float32)
    wanted, seen = mixer(x), []
    handle = mixer.value_proj.linear.register_forward_hook(lambda _, __, y: seen.append(y.detach().clone()))
    assert_close({"y": mixer(x)}, {"y": wanted}, 1e-5)
    assert_close({"y": seen[0]}, {"y": mixer.value_proj.linear(x)}, 1e-6)
    handle.remove()
    assert not mixer.value_proj.linear._forward_hooks and len(seen) == 2

    class Adapter(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    mixer.prior_proj.linear.__class__ = Adapter
    twice = mixer(x)
    mixer.prior_proj.linear.__class__ = torch.nn.Linear
    with torch.no_grad():
        for parameter in mixer.prior_proj.linear.parameters():
            parameter.mul_(2)
    assert_close({"y": twice}, {"y": mixer(x)}, 1e-5)
    assert (twice - wanted).abs().max() > 1e-3


@pytest.mark.parametrize("where", ["projection", "linear", "prior"])
def test_what_takes_the_place_of_a_part_is_used_with_and_without_gradients(where):
    """A forward or a read that somebody has put on a module of a mixer."""
    mixer, x, calls = stir(FreeEnergyMixer(64, 2)), noise(2, 71, 64, dtype=torch.float32), []
    part = {"projection": mixer.value_proj, "linear": mixer.value_proj.linear, "prior": mixer.prior}[where]
    name = "read" if where == "prior" else "forward"
    inner = getattr(part, name)
    setattr(part, name, lambda *args: (calls.append(torch.is_grad_enabled()), inner(*args))[1])
    y = mixer(x)
    with torch.no_grad():
        assert_close({"y": mixer(x)}, {"y": y.detach()}, 1e-5)
    assert calls == [True, False]
    mixer.value_proj = torch.nn.Sequential(mixer.value_proj) if where == "projection" else mixer.value_proj
    if where == "projection":
        mixer.value_proj.forward = lambda x, features: mixer.value_proj[0](x, features)
        assert_close({"y": mixer(x)}, {"y": y}, 1e-5)


def test_gradients_under_autocast_are_those_without():
    """To the precision that torch then has in the gradient of the last projection."""
    mixer, x = stir(FreeEnergyMixer(64, 2)), noise(2, 71, 64, dtype=torch.float32).requires_grad_()
    wanted = torch.autograd.grad(mixer(x).square().sum(), [x, *mixer.parameters()])
    loss = mixer(x).square().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(loss, [x, *mixer.parameters()])
    for a, b in zip(found, wanted, strict=True):
        assert_close({"x": a}, {"x": b}, 2e-2)


@pytest.mark.parametrize("size", [1.0, 2000.0])
def test_a_mixer_may_be_computed_again_for_its_gradients(size):
    """Checkpointed, also where heads are read again."""
    mixer, x = stir(FreeEnergyMixer(64, 2)), noise(2, 71, 64, dtype=torch.float32).requires_grad_()
    with torch.no_grad():
        mixer.value_proj.linear.weight.mul_(size)
    wanted = torch.autograd.grad(mixer(x).square().sum(), [x, *mixer.parameters()])
    y = checkpoint(mixer, x, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()]), wanted, strict=True):
        assert_close({"x": a}, {"x": b}, 1e-6)


@pytest.mark.parametrize(("dim", "heads"), [(30, 1), (42, 3)])
def test_one_token_is_trained_where_widths_are_odd(dim, heads):
    mixer = stir(FreeEnergyMixer(dim, heads, dtype=torch.float64))
    x = noise(1, 1, dim)
    exact = mixer(x)
    assert_close({"y": mixer.float()(x.float())}, {"y": exact}, 1e-5)


@pytest.mark.parametrize("parts", ["L", "LG", "CL", "LT", "CLTG"])
@pytest.mark.parametrize("length", [71, 300])
def test_a_token_that_is_not_a_number_shows_in_every_later_one(parts, length):
    mixer, x = stir(FreeEnergyMixer(64, 2, parts=parts)), noise(3, length, 64, dtype=torch.float32)
    x[1, 50, 3] = torch.nan
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded):
            y = mixer(x)
        assert y[1, 50:].isnan().all() and y[[0, 2]].isfinite().all()


def test_what_a_projection_kept_may_come_back_as_copies():
    """As from hooks that keep saved tensors elsewhere: pieces of one tensor are tensors of their own then."""
    mixer, x = stir(FreeEnergyMixer(32, 2)), noise(2, 9, 32, dtype=torch.float32)
    gradients = []
    for keep in (lambda t: t, torch.clone):
        mixer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            mixer(x).square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in mixer.named_parameters()})
    assert_close(gradients[1], gradients[0], 1e-6)


@pytest.mark.parametrize(("tokens", "dim", "outputs"), [(1, 5, 3), (67, 53, 24), (67, 53, 25), (5, 64, 72)])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_a_normalized_projection_and_its_gradients_are_the_definitions(monkeypatch, tokens, dim, outputs, offset):
    monkeypatch.setattr(conditioner, "NUMBERS", 1000)  # many outputs go through several stretches of tokens
    x, weights = noise(3, tokens, dim) + offset, noise(3, tokens, outputs, seed=3)
    weight, bias = noise(outputs, dim, seed=1), noise(outputs, seed=2)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = F.linear(F.layer_norm(x, (dim,), eps=1e-5), weight, bias)
    exact = (y, *torch.autograd.grad((y * weights).sum(), leaves))
    leaves = [t.detach().float().requires_grad_() for t in leaves]
    y = NormalizedLinear.apply(*leaves)
    fast = (y, *torch.autograd.grad((y * weights.float()).sum(), leaves))
    for wanted, seen in zip(exact, fast, strict=True):
        scale = wanted.detach().abs().max().item()
        assert_close({"x": seen / scale}, {"x": wanted / scale}, 1e-5 if offset else 3e-6)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "width"), [(2, 13, (3, 1), 10), (1, 1, (5, 5), 6), (3, 67, (4, 2), 64)]
)
def test_turned_features_and_their_gradients_are_the_definitions(batch, length, heads, width):
    whole = noise(batch, length, sum(heads) * width + 3)  # q and k lie side by side, in front of something else
    position = torch.randint(0, 10000, (batch, length), generator=torch.Generator().manual_seed(0))
    weights, results = noise(batch, length, sum(heads), width, seed=1), []
    for dtype in (torch.float64, torch.float32):
        leaf = whole.to(dtype).requires_grad_()
        q, k, _ = leaf.split([*(h * width for h in heads), 3], -1)
        y = torch.cat(rotated(q, k, Turn(position, width, 10000.0, floor=1e-6), dtype), 2)
        results.append((y, *torch.autograd.grad((y * weights.to(dtype)).sum(), leaf)))
    assert (results[0][0] >= 1e-6).all()
    for exact, fast in zip(*results, strict=True):
        assert_close({"x": fast}, {"x": exact}, 3e-6)


@pytest.mark.parametrize("prior", ["softmax", "linear", "gla"])
@pytest.mark.parametrize("masked", [False, True])
def test_queries_and_keys_are_modulated_and_turned_at_once_without_gradients(monkeypatch, prior, masked):
    """320 wide, so that the conditioner has more features than the kernels for few of them take."""
    monkeypatch.setattr(projection, "NUMBERS", 10_000)
    mixer = stir(FreeEnergyMixer(320, 5, prior=prior, kv_heads=1, value_dim=160, dtype=torch.float64))
    x, mask = noise(2, 67, 320), torch.ones(2, 67, dtype=torch.bool)
    mask[0, 3:9] = mask[1, :20] = not masked  # positions differ between the rows
    wanted, calls = mixer(x, mask=mask), []
    monkeypatch.setattr(projection, "modulate_and_turn", lambda *a: (calls.append(1), rotary.modulate_and_turn(*a)))
    mixer.float()
    with torch.no_grad():
        y = mixer(x.float(), mask=mask)
    assert calls
    assert_close({"y": y}, {"y": wanted}, 3e-5)


@pytest.mark.parametrize("shape", [(7, 5, 13), (2, 1, 64), (1031, 3), (8,)])
def test_norm_and_its_gradients_are_the_definitions(shape):
    norm = RMSNorm(shape[-1], eps=1e-5)
    x, weight, weights = noise(*shape), noise(shape[-1], seed=1), noise(*shape, seed=2)
    norm.weight.data = weight.float()
    exact, fast = x.clone().requires_grad_(), x.float().requires_grad_()
    weight = weight.float().double().requires_grad_()
    y = F.rms_norm(exact, shape[-1:], weight, 1e-5)
    expected = (y, *torch.autograd.grad((y * weights).sum(), (exact, weight)))
    y = norm(fast)
    actual = (y, *torch.autograd.grad((y * weights.float()).sum(), (fast, norm.weight)))
    assert_close(dict(zip("ywx", actual, strict=True)), dict(zip("ywx", expected, strict=True)), 3e-6)


def test_threads_do_not_change_a_digit():
    """Tasks write to places of their own; sums over tasks are made in one order."""
    torch.manual_seed(0)
    mixer = FreeEnergyMixer(32, 4, parts="CLTG")
    norm = RMSNorm(32)
    x = torch.randn(67, 31, 32)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            y = mixer(norm(x))
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), (norm.weight, mixer.raw_beta))])
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_second_derivatives_are_refused_and_not_wrong():
    mixer, x = FreeEnergyMixer(16, 2), torch.randn(1, 5, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(mixer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()
