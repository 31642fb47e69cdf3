"""The softmax read's GPU kernels in Triton's interpreter, against the definition; and what they launch and keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from femixer import FreeEnergyMixer, use_backend
from femixer.kernels import check, dispatch
from femixer.kernels.softmax import OPERATOR, definition, examples, softmax_read
from femixer.kernels.triton_launch import aimed_at, recorded

EXAMPLES = examples()
# The interpreter is slow: what two sequences show, one does too.
SHORT = [name for name, given in EXAMPLES.items() if given[1].shape[1] <= 13 and name != "many heads"]
LONG = ["encoder window", "chunk of segments"]


def one_sequence(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The last of the batch."""
    return tuple(x[-1:] if isinstance(x, Tensor) and i != 3 else x for i, x in enumerate(arguments))


@pytest.fixture
def deterministic() -> Iterator[None]:
    """What a test asks of torch ends with it."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def read_of(
    length: int, *, size: float = 1.0, beta: float = 1.3, key_width: int = 3, width: int = 2, **options: Any
) -> tuple[Any, ...]:
    """Arguments with one sequence and head."""
    generator = torch.Generator().manual_seed(length)
    q, k = (torch.randn(1, length, 1, key_width, generator=generator) for _ in range(2))
    v = size * torch.randn(1, length, 1, width, generator=generator)
    seen = {"bias": None, "segments_q": None, "segments_k": None, "causal": True, "window": None, **options}
    return q, k, v, torch.full((1, width), beta), *seen.values(), key_width**-0.5


def run(arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, free energy, and which rows were read exactly."""
    with use_backend("triton"), torch.no_grad():
        mean, free, _, flags, *_ = OPERATOR(*arguments)
    return mean, free, flags


@pytest.mark.parametrize("name", SHORT + LONG)
def test_results_and_gradients_are_the_definitions(name: str) -> None:
    errors = check.compare(OPERATOR, "triton", one_sequence(EXAMPLES[name]))
    assert errors.results < 1e-5, errors
    assert max(errors.gradients.values()) < 1e-4, errors


@pytest.mark.parametrize("length", [2, 17, 129])
def test_any_length_is_read(length: int) -> None:
    errors = check.compare(OPERATOR, "triton", read_of(length))
    assert errors.results < 1e-5, errors
    assert max(errors.gradients.values()) < 1e-4, errors


@pytest.mark.parametrize("name", ["causal", "segments, window and bias"])
def test_half_precision_errs_little_more_than_torch(name: str) -> None:
    arguments = one_sequence(EXAMPLES[name])
    ours = check.compare(OPERATOR, "triton", arguments, torch.float16)
    torchs = check.compare(OPERATOR, "plain", arguments, torch.float16)
    assert ours.results <= 2 * torchs.results + 1e-3
    for argument, error in ours.gradients.items():
        assert error <= 3 * torchs.gradients[argument] + 1e-3, argument


def test_a_large_value_of_the_future_changes_nothing_before() -> None:
    arguments = read_of(157)
    later = list(arguments)
    later[2] = arguments[2].clone()
    later[2][:, 149] = 1e4
    (mean, free, flags), (mean_later, free_later, flags_later) = run(arguments), run(tuple(later))
    assert not flags.any() and flags_later[..., 128:].all() and not flags_later[..., :128].any()
    assert torch.equal(mean[:, :149], mean_later[:, :149])
    assert (free - free_later)[:, :149].abs().max() < 5e-6
    expected = definition(*later)[1]
    assert ((free_later - expected).abs() / expected.abs().clamp_min(1)).max() < 1e-5


@pytest.mark.parametrize(("size", "beta"), [(0.5, 0.02), (40.0, 0.02), (2000.0, 5.0), (1e-3, 1.0)])
@pytest.mark.parametrize("causal", [True, False])
def test_the_free_energy_is_exact_at_any_temperature(size: float, beta: float, causal: bool) -> None:
    arguments = read_of(37, size=size, beta=beta, width=17, causal=causal)
    mean, free, _ = run(arguments)
    expected = definition(*arguments)[1]
    assert ((free - expected).abs() / expected.abs().clamp_min(1)).max() < 1e-5
    assert (free >= mean).all()


@pytest.mark.parametrize(("target", "width"), [("sm_80", 33), ("sm_90", 33), ("sm_120", 65)])
def test_wide_heads_with_decays_are_multiplied_in_parts(target: str, width: int) -> None:
    until = torch.linspace(-0.3, -7.0, 35)
    with aimed_at(target), recorded() as launches:
        sums = torch.cat([until + 0.2, until])[None, None]
        errors = check.compare(OPERATOR, "triton", read_of(35, bias=sums, key_width=width))
    parts = {(each.options["APART"], each.options["KEY_WIDTH"]) for each in launches if each.name == "to_keys"}
    assert parts == {{"sm_80": (16, 64), "sm_90": (32, 64), "sm_120": (64, 128)}[target]}
    assert errors.results < 1e-5, errors
    assert max(errors.gradients.values()) < 1e-4, errors


def test_decays_keep_their_digits_late_in_a_sequence_and_in_rows_that_are_read_exactly() -> None:
    """Strong decays before weak ones, after sums that float32 would round to a hundredth; one value is large."""
    gates = torch.cat([torch.full((31,), -20.0), torch.linspace(-0.3, -0.01, 106)]).double()
    until = -1e5 + gates.cumsum(0)
    segments = (torch.arange(137)[None] // 83).masked_fill(torch.arange(137)[None] == 59, -1)
    sums = torch.cat([until - gates, until])[None, None]
    arguments = read_of(137, bias=sums, segments_q=segments, segments_k=segments)
    arguments[2][:, 133] = 100.0
    flags = run(arguments)[2]
    assert flags[..., 128:133].all() and not flags[..., :128].any()
    errors = check.compare(OPERATOR, "triton", arguments)
    assert errors.results < 1e-5, errors
    assert max(errors.gradients.values()) < 1e-4, errors


def test_padding_may_hold_any_value() -> None:
    segments = torch.zeros(1, 21, dtype=torch.long)
    segments[:, [0, 7, 8, 20]] = -1
    arguments = read_of(21, segments_q=segments, segments_k=segments)
    other = list(arguments)
    other[2] = torch.where((segments < 0)[..., None, None], 1e6, arguments[2])
    for a, b in zip(run(arguments), run(tuple(other)), strict=True):
        assert torch.equal(a, b)
        assert not a[:, 7].any() if a.dim() == 4 else True


def on_meta(length: int, dtype: torch.dtype = torch.float32, **options: Any) -> list[str]:
    """Names of the launches of a read forward and backward, without data."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta", dtype=dtype, requires_grad=True)

    q, k, v = empty(2, length, 4, 64), empty(2, length, 2, 64), empty(2, length, 2, 32)
    with use_backend("triton"), recorded() as launches:
        mean, free = softmax_read(q, k, v, empty(2, 32), **options)
        assert free is not None
        launches.append(None)  # type: ignore[arg-type]
        torch.autograd.backward([mean, free], [torch.empty_like(mean), torch.empty_like(free)])
    assert all(each is None or (each.flops >= 0 and each.bytes > 0) for each in launches)
    return ["|" if each is None else each.name for each in launches]


def test_a_forgetting_layer_runs_on_kernels_with_padding_too() -> None:
    torch.manual_seed(0)
    layer, x = FreeEnergyMixer(8, 2, "fox", kv_heads=1), torch.randn(2, 7, 8)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    keep = torch.arange(7) >= torch.tensor([[0], [3]])
    with use_backend("triton"), torch.no_grad(), recorded() as found:
        y, state = layer(x, mask=keep, return_state=True)
        later, _ = layer(x[:, :1], state=state, return_state=True)
    assert {"softmax.read", "softmax.split_sums", "softmax_step.read_splits"} <= {each.label for each in found}
    expected = layer.double()(torch.cat([x, x[:, :1]], 1).double(), mask=torch.cat([keep, keep[:, -1:]], 1))
    assert (torch.cat([y, later], 1) - expected).abs().max() < 1e-5


def test_launches_are_few_and_do_not_depend_on_the_length(deterministic: None) -> None:
    forward = ["block_ranges", "streams", "read", "read_exactly"]
    once, twice = ["inner", "to_keys"], ["inner", "to_keys", "to_queries"]
    for repeatable in (False, True):
        torch.use_deterministic_algorithms(repeatable)
        backward = [*(twice if repeatable else once), "flagged_rows", "flagged_keys"]
        for length in (1000, 65536):
            assert on_meta(length) == [*forward, "|", *backward]
            assert on_meta(length, torch.bfloat16, window=100) == [*forward, "|", *backward]


@pytest.mark.parametrize("name", [*LONG, "segments, window and bias", "decays, window and a chunk", "large values"])
def test_repeatable_gradients_are_the_definitions_too(name: str, deterministic: None) -> None:
    arguments = one_sequence(EXAMPLES[name])
    torch.use_deterministic_algorithms(True)
    errors = check.compare(OPERATOR, "triton", arguments)
    assert max(errors.gradients.values()) < 1e-4, errors


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_sums_of_one_pass_are_those_of_two(target: str, deterministic: None) -> None:
    """Over several tiles of rows and of keys, with flagged rows and one bias for every score."""
    arguments = read_of(149, bias=torch.randn(1, 1, 149, 149, generator=torch.Generator().manual_seed(0)))
    arguments[2][:, 131] = 100.0
    assert run(arguments)[2][..., 128:131].all()
    inputs = [x.requires_grad_() for x in arguments if isinstance(x, Tensor)]
    found = []
    for repeatable in (False, True):
        torch.use_deterministic_algorithms(repeatable)
        with use_backend("triton"), aimed_at(target), recorded() as launches:
            mean, free, *_ = OPERATOR(*arguments)
            found.append(torch.autograd.grad(mean.square().sum() + free.sum(), inputs))
        assert ("to_queries" in [each.name for each in launches]) == repeatable
    for x, once, twice in zip(inputs, *found, strict=True):
        assert (once - twice).abs().max() <= 2e-6 * twice.abs().max().clamp_min(1), x.shape


def test_keys_past_the_last_one_weigh_nothing_where_all_scores_are_low() -> None:
    """An encoder whose scores are so low that exp(0) is infinitely more than their sum."""
    arguments = read_of(37, causal=False)
    arguments[1][...] = -arguments[0].mean(1, keepdim=True).sign()
    arguments[0][...] = 300 * arguments[0].abs() * arguments[0].mean(1, keepdim=True).sign()
    errors = check.compare(OPERATOR, "triton", arguments)
    assert max(errors.gradients.values()) < 1e-4, errors


def test_what_it_does_not_serve_has_a_reason() -> None:
    wide = read_of(3, key_width=129)
    assert dispatch.refusal(OPERATOR, "triton", wide) == (
        "keys of 129 and values of 2 channels are too wide, 128 are the most"
    )
    double = tuple(x.double() if isinstance(x, Tensor) else x for x in read_of(3))
    assert dispatch.refusal(OPERATOR, "triton", double) == "it takes float32, bfloat16 and float16, not torch.float64"
    with use_backend("triton"), pytest.raises(dispatch.BackendError, match="are too wide"):
        OPERATOR(*wide)
