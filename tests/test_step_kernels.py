"""The compiled kernels of gates and of single tokens: against the definition in float64, and against plain torch."""

import pytest
import torch
from torch import Tensor

from femixer import FreeEnergyMixer, free_energy
from femixer.baselines import Attention
from femixer.gates import gated_read, outer_gate
from femixer.kernels import backend
from femixer.layout import Layout
from femixer.models.norm import RMSNorm
from femixer.rotary import Turn, rotated
from femixer.state import Growing

VARIANTS = {
    "softmax": {},
    "softmax exp": {"prior_options": {"cache": "exp"}},
    "softmax grouped": {"kv_heads": 1},
    "softmax mean": {"parts": "G"},
    "softmax without rope": {"rope": False},
    "linear": {"prior": "linear"},
    "gla": {"prior": "gla"},
    "aft": {"prior": "aft"},
    "mamba": {"prior": "mamba"},
}


def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_usable", False)


def gate_inputs(width: int) -> list[Tensor]:
    """Mean, free energy and logits [2, 7, 3, width] as a mixer has them: views of larger tensors, extreme logits."""
    make = torch.Generator().manual_seed(width)
    projected = 8 * torch.randn(2, 7, 3 * 3 * width, generator=make)
    projected[0, 0, : projected.shape[-1] // 2] = -200.0
    projected[1, 3, projected.shape[-1] // 2 :] = 200.0
    mean = torch.randn(2, 3, 7, width, generator=make).transpose(1, 2)
    free = mean + torch.rand(2, 7, 3, width, generator=make)
    _, lam, gate = (part.unflatten(-1, (3, width)) for part in projected.split(3 * width, -1))
    return [mean, free, lam, gate]


def definition(mean: Tensor, free: Tensor | None, lam: Tensor | None, gate: Tensor | None) -> Tensor:
    read = mean if free is None else free if lam is None else mean + torch.sigmoid(lam) * (free - mean)
    return read if gate is None else read * outer_gate(gate)


@pytest.mark.parametrize("width", [1, 5, 8, 33])
@pytest.mark.parametrize("given", [(0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (0, 3)])
def test_gates_and_their_gradients_are_the_definitions(width, given):
    assert backend.compiled(torch.empty(1)), "these tests are about the compiled kernels: is numba installed?"
    inputs = gate_inputs(width)
    weights = torch.randn(2, 7, 3, width, generator=torch.Generator().manual_seed(9))
    results = []
    for read, dtype in ((definition, torch.float64), (gated_read, torch.float32)):
        # Gradients of the views' bases: what a mixer's projections receive.
        leaves = [x.to(dtype).detach().requires_grad_() if i in given else None for i, x in enumerate(inputs)]
        y = read(*(None if x is None else x * 1 for x in leaves))
        (y * weights).sum().backward()
        results.append([y.detach(), *(x.grad for x in leaves if x is not None and x.grad is not None)])
    assert len(results[0]) == len(results[1])
    for exact, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast.double(), exact, atol=5e-6 * float(exact.abs().max()), rtol=5e-6)


def test_gates_read_views_where_they_are():
    """Not only contiguous tensors: columns of a projection, heads that were transposed, a single row."""
    mean, free, lam, gate = gate_inputs(11)
    with torch.no_grad():
        whole = gated_read(mean, free, lam, gate)
        copied = gated_read(*(x.contiguous() for x in (mean, free, lam, gate)))
        some = gated_read(*(x[1:, 2:3] for x in (mean, free, lam, gate)))
        none = gated_read(*(x[:, :0] for x in (mean, free, lam, gate)))
    assert torch.equal(whole, copied)
    assert torch.equal(some, whole[1:, 2:3])
    assert none.shape == (2, 0, 3, 11)


@pytest.mark.parametrize("which", range(4))
def test_what_is_not_a_number_does_not_disappear_in_the_gates(which):
    inputs = gate_inputs(11)
    inputs[which] = inputs[which].clone()
    inputs[which][1, 2, 0, 3] = torch.nan
    with torch.no_grad():
        read = gated_read(*inputs)
    assert read[1, 2, 0, 3].isnan()
    assert torch.isfinite(read[0]).all()


def build(name: str) -> FreeEnergyMixer:
    torch.manual_seed(0)
    mixer = FreeEnergyMixer(28, 2, **VARIANTS[name]).eval()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return mixer


def decoded(mixer: torch.nn.Module, x: Tensor, start: int) -> Tensor:
    with torch.no_grad():
        _, state = mixer(x[:, :start], return_state=True)
        rows = []
        for t in range(start, x.shape[1]):
            y, state = mixer(x[:, t : t + 1], state=state, return_state=True)
            rows.append(y)
    return torch.cat(rows, 1)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_decoding_with_and_without_compiled_kernels_is_the_full_pass(name, batch, monkeypatch):
    mixer, x = build(name), torch.randn(batch, 83, 28, generator=torch.Generator().manual_seed(batch))
    fast = decoded(mixer, x, 67)
    plainly(monkeypatch)
    with torch.no_grad():
        whole = mixer(x)[:, 67:]
    for decoding in (fast, decoded(mixer, x, 67)):
        torch.testing.assert_close(decoding, whole, atol=3e-6 * float(whole.abs().max()), rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith("softmax")])
def test_every_decoded_token_of_the_softmax_prior_is_one_call_of_its_kernel(name, monkeypatch):
    """Plain torch computes the same, so that nothing but the speed would show that it took over."""
    calls, kernel = [], backend.native("softmax_step")
    step = kernel.step
    monkeypatch.setattr(kernel, "step", lambda *args: (calls.append(1), step(*args)))
    decoded(build(name), torch.randn(2, 13, 28), 7)
    assert len(calls) == 6


@pytest.mark.parametrize("cache", ["value", "exp"])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_not_a_number_does_not_disappear_in_a_step(which, cache):
    mixer = FreeEnergyMixer(28, 2, rope=False, prior_options={"cache": cache}).eval()
    state = None
    with torch.no_grad():
        for length in (5, 1):
            x = {"q": torch.randn(1, length, 28), "k": torch.randn(1, length, 28), "v": torch.randn(1, length, 2, 7)}
            if length == 1:
                x[which].view(-1)[3] = torch.nan
            v = x.pop("v")
            mean, free, state = mixer.prior.read(
                x, v, mixer._beta(), Layout(None, torch.arange(length)[None]), state, True
            )
    for read in (mean, free):
        assert read[0, 0, 0, 3].isnan()
        assert torch.isfinite(read[0, 0, 1]).all()


def test_steps_go_on_where_a_cached_exponential_was_renewed():
    """A value far above the shift makes the stream anew, with less room behind it than the keys have."""
    torch.manual_seed(0)
    mixer = FreeEnergyMixer(28, 2, parts="LTG", prior_options={"cache": "exp"}).eval()
    with torch.no_grad():
        mixer.value_proj.linear.weight.mul_(30)
    x = torch.randn(1, 60, 28)
    x[:, 30] *= 40
    found = decoded(mixer, x, 20)
    with torch.no_grad():
        _, state = mixer(x[:, :29], return_state=True)
        for t in range(29, 33):
            _, state = mixer(x[:, t : t + 1], state=state, return_state=True)
        whole = mixer(x)
    assert state.prior.keys.buffer.shape[2] != state.prior.stream.data.buffer.shape[2]
    torch.testing.assert_close(found, whole[:, 20:], atol=1e-5 * float(whole.abs().max()), rtol=1e-5)


def test_steps_go_on_where_only_the_keys_were_recorded():
    """With gradients the keys are joined and the values, which have none, grow in place: their rooms differ."""
    torch.manual_seed(0)
    mixer = FreeEnergyMixer(28, 2, parts="LTG")
    mixer.value_proj.requires_grad_(False)
    x = torch.randn(1, 30, 28)
    first, state = mixer(x[:, :10], return_state=True)
    second, state = mixer(x[:, 10:15], state=state, return_state=True)
    outputs = [first, second]
    with torch.no_grad():
        for t in range(15, 30):
            y, state = mixer(x[:, t : t + 1], state=state, return_state=True)
            outputs.append(y)
        assert state.prior.keys.buffer.shape[2] != state.prior.stream.data.buffer.shape[2]
        torch.testing.assert_close(torch.cat(outputs, 1), mixer(x), atol=3e-6, rtol=1e-5)


def test_of_two_continuations_of_one_prefix_only_one_gets_the_room_behind_it():
    """Claimed before it is written, so that threads that go on from one prefix do not write over each other."""
    prefix = Growing.of(torch.zeros(1, 1, 3, 2)).append(torch.zeros(1, 1, 1, 2))
    assert prefix.buffer.shape[2] > 5
    assert prefix._storage.claim(4, 5)
    assert not prefix._storage.claim(4, 5)
    assert prefix.append(torch.ones(1, 1, 1, 2)).buffer is not prefix.buffer


def test_a_batch_of_nothing_takes_a_step():
    for name in VARIANTS:
        mixer = build(name)
        with torch.no_grad():
            _, state = mixer(torch.empty(0, 3, 28), return_state=True)
            assert mixer(torch.empty(0, 1, 28), state=state, return_state=True)[0].shape == (0, 1, 28)


def test_attention_decodes_the_same_with_compiled_rotations(monkeypatch):
    torch.manual_seed(0)
    layer, x = Attention(28, 2, kv_heads=1), torch.randn(3, 13, 28)
    fast = decoded(layer, x, 7)
    plainly(monkeypatch)
    torch.testing.assert_close(fast, decoded(layer, x, 7), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("cache", ["value", "exp"])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_step_that_one_pass_cannot_read_is_read_exactly(cache, heads):
    """The largest value by far lies where the query does not look: all exponentials that count underflow beside it."""
    mixer = FreeEnergyMixer(28, 2, kv_heads=heads, rope=False, prior_options={"cache": cache}).eval()
    make = torch.Generator().manual_seed(5)
    q, k = torch.zeros(1, 71, 28), torch.randn(1, 71, 14 * heads, generator=make)
    v = torch.randn(1, 71, heads, mixer.widths.value, generator=make)
    q[..., ::14], k[:, 3, ::14], v[:, 3] = 20.0, -20.0, 1000.0
    layout = Layout(None, torch.arange(71)[None])
    with torch.no_grad():
        state = None
        for rows in (slice(0, 70), slice(70, 71)):
            here = Layout(None, layout.position[:, rows])
            part = {"q": q[:, rows], "k": k[:, rows]}
            _, free, state = mixer.prior.read(part, v[:, rows], mixer._beta(), here, state, True)
        p = mixer.prior.weights({"q": q, "k": k}, layout)[:, :, -1:]
        values = v.double().repeat_interleave(2 // heads, 2).transpose(1, 2)
        exact = free_energy(p, values, mixer.beta_max.double()[:, None])
    torch.testing.assert_close(free.double().transpose(1, 2), exact, atol=1e-5, rtol=1e-5)


def test_angles_far_out_are_as_good_as_near():
    """Positions of a million: rotations are made in float64, so scores depend on the distance only."""
    q, k = torch.randn(1, 1, 24), torch.randn(1, 1, 24)
    scores = []
    with torch.no_grad():
        for far in (0, 1_000_000):
            a, _ = rotated(q, k, Turn(torch.tensor([[far + 7]]), 8, 10000.0), torch.float32)
            _, b = rotated(q, k, Turn(torch.tensor([[far]]), 8, 10000.0), torch.float32)
            scores.append((a * b).sum(-1))
    torch.testing.assert_close(scores[1], scores[0], atol=2e-6, rtol=1e-5)


def test_the_norm_of_a_single_token_takes_only_tokens():
    """[B, 1, heads, width] is no step of decoding."""
    norm, x = RMSNorm(5, eps=1e-6), torch.randn(3, 1, 7, 5)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (5,), norm.weight, 1e-6))
