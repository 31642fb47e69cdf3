"""Decoding a mixer token by token: the full pass on every backend, and what its cache must survive."""

import pytest
import torch
from torch import Tensor

from femixer import FreeEnergyMixer, use_backend
from femixer.layout import Layout
from femixer.state import Growing

VARIANTS = {
    "softmax": {},
    "softmax exp": {"prior_options": {"cache": "exp"}},
    "softmax grouped": {"kv_heads": 1},
    "softmax mean": {"parts": "G"},
    "softmax without rope": {"rope": False},
    "fox": {"prior": "fox"},
    "linear": {"prior": "linear"},
    "gla": {"prior": "gla"},
    "aft": {"prior": "aft"},
    "mamba": {"prior": "mamba"},
}


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
@pytest.mark.parametrize("backend", ["plain", "numba"])
def test_decoding_is_the_full_pass_in_plain_torch(name, batch, backend):
    mixer, x = build(name), torch.randn(batch, 83, 28, generator=torch.Generator().manual_seed(batch))
    with torch.no_grad(), use_backend("plain"):
        whole = mixer(x)[:, 67:]
    with use_backend(backend):
        steps = decoded(mixer, x, 67)
    torch.testing.assert_close(steps, whole, atol=3e-6 * float(whole.abs().max()), rtol=1e-5)


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
