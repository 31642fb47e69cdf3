"""The numbers of docs/differences.md: `python benchmarks/differences.py`, a minute. What others compute is written
down here from their formulas, in a few lines each, and never used by the library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from femixer import FreeEnergyMixer
from femixer.gates import inverse_temperature
from femixer.models import FEMForCausalLM, preset
from femixer.rotary import Rotation, rotated


def shares() -> Iterator[str]:
    """The conditioner's part of a model's parameters, with the width here and with the paper's d / 16."""
    for prior in ("softmax", "gla", "aft", "mamba"):
        with torch.device("meta"):
            model = FEMForCausalLM(preset("340m", prior=prior))
        total = sum(p.numel() for p in model.parameters())
        own = sum(p.numel() for n, p in model.named_parameters() if "conditioner" in n or n.endswith("modulation"))
        mixer = next(m for m in model.modules() if isinstance(m, FreeEnergyMixer))
        assert mixer.conditioner is not None
        here, paper = mixer.conditioner.channels, mixer.heads * mixer.widths.value // 16
        wider = own * paper / here
        share = wider / (total - own + wider)
        yield f"340m {prior}: conditioner {here} wide, {own / total:.2%} of the whole; d / 16 = {paper}: {share:.2%}"


def printed_lambda() -> str:
    """lambda (1 + eta) as printed, where lambda = sigmoid(a) and a, eta are standard normal."""
    torch.manual_seed(0)
    a, eta = torch.randn(2, 1_000_000)
    printed = a.sigmoid() * (1 + eta)
    outside = ((printed < 0) | (printed > 1)).double().mean().item()
    return f"printed lambda outside [0, 1]: {outside:.1%} of a, eta ~ N(0, 1); sigmoid(a (1 + eta)): 0 %"


def printed_values() -> str:
    """v_i (1 + eta_t) has an exponential for every pair of tokens."""
    length, width = 1024, 256
    once, pairs = length * width, length**2 * width
    return f"exponentials of a layer at {length} tokens, {width} channels: {once:,}; with eta_t {pairs:,}"


def zero_embeddings() -> str:
    """Gradients of a model whose embeddings all start at zero."""
    found = {}
    for name, std in (("N(0, 0.02)", 0.02), ("zero", 0.0)):
        torch.manual_seed(0)
        model = FEMForCausalLM(preset("tiny", vocab_size=97))
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=std)
        words = torch.randint(97, (2, 64))
        model(words, labels=words).loss.backward()
        norms = [p.grad.norm() for n, p in model.named_parameters() if "layers" in n and p.grad is not None]
        found[name] = torch.stack(norms).norm().item()
    return "gradient of all layers, embeddings " + ", ".join(f"{name}: {g:.3g}" for name, g in found.items())


def temperatures() -> str:
    start = inverse_temperature(torch.zeros(1)).item()
    return f"beta_max starts at softplus(1.8) = {start:.4f}; 1 would be softplus({math.log(math.e - 1):.4f})"


def decays() -> str:
    zero = 1 / math.log(2)
    mixer = FreeEnergyMixer(512, 8)
    assert mixer.conditioner is not None
    spans = 1 / functional.softplus(mixer.conditioner.in_proj.bias[: mixer.conditioner.channels])
    return f"memory of the conditioner: at a zero bias {zero:.2f} tokens; here {spans.min():.1f} to {spans.max():.0f}"


def last_error(read: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Relative, at the last position, in float32 against float64."""
    found, expected = read(x)[-1].double(), exact(x.double())[-1]
    return ((found - expected).norm() / expected.norm()).item()


def conditioner_by_quotient(length: int) -> tuple[float, float]:
    """h = exp(-S_t) cumsum(u / (exp(-S) + 1e-12)), then the recurrence, both against the recurrence in float64."""
    torch.manual_seed(0)
    u, steps = torch.randn(length, 64), functional.softplus(0.3 * torch.randn(length, 64))

    def quotient(x: Tensor) -> Tensor:
        envelope = (-steps.to(x).cumsum(0)).exp()
        return (x / (envelope + 1e-12)).cumsum(0) * envelope

    def recurrence(x: Tensor) -> Tensor:
        state, rows = torch.zeros_like(x[0]), []
        for value, step in zip(x, steps.to(x), strict=True):
            state = (-step).exp() * state + value
            rows.append(state)
        return torch.stack(rows)

    return last_error(quotient, recurrence, u), last_error(recurrence, recurrence, u)


def gated_read_clipped(length: int) -> float:
    """A read with decays exp(c_t - c_i), where c is clipped at -60: the mean absolute error over the last quarter."""
    torch.manual_seed(0)
    q, k = (functional.relu(torch.randn(length, 32)) + 1e-6 for _ in range(2))
    v, gates = torch.randn(length, 16), -functional.relu(torch.randn(length)) - 1e-6

    def read(cumulative: Tensor) -> Tensor:
        scores = (q @ k.T).double() * (cumulative[:, None] - cumulative).exp().tril()
        return scores @ v.double() / scores.sum(1, keepdim=True)

    cumulative = gates.double().cumsum(0)
    error = (read(cumulative.clip(min=-60)) - read(cumulative)).abs()
    return error[-length // 4 :].mean().item()


def future_through_the_maximum() -> float:
    """An AFT read shifted by the largest key of the whole sequence, with 1e-6 added to each weight: how far earlier
    reads move when the last token is multiplied by 100."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 64, 16)

    def read(k: Tensor) -> Tensor:
        weights = (k - k.amax(0)).exp() + 1e-6
        return (weights * v).cumsum(0) / weights.cumsum(0)

    louder = torch.cat([k[:-1], 100 * k[-1:].abs()])
    return (read(louder) - read(k))[:-1].abs().max().item()


def padding_by_zeroed_keys() -> float:
    """The weight that 32 padded tokens keep beside 32 real ones when their keys and values are set to zero."""
    torch.manual_seed(0)
    q, k = torch.randn(64), torch.randn(64, 64)
    k[:32] = 0
    return (k @ q / 8).softmax(0)[:32].sum().item()


def rotation_by_other_pairs() -> tuple[float, float]:
    """Neighbours as pairs, frequencies of halves: the change of a score when both positions move by 100. Then here."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16).double()
    frequency = 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)

    def turned(x: Tensor, position: int) -> Tensor:
        angle = position * torch.cat([frequency, frequency])
        across = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * angle.cos() + across * angle.sin()

    def here(position: int) -> Tensor:
        places = [torch.tensor([[place]]) for place in (position, position + 3)]
        pair = [
            rotated(x.flatten(-2), x.flatten(-2), Rotation(at, 16, 10000.0), x.dtype)[0]
            for x, at in zip((q, k), places, strict=True)
        ]
        return (pair[0] * pair[1]).sum()

    theirs = [(turned(q, at) * turned(k, at + 3)).sum() for at in (0, 100)]
    ours = [here(at) for at in (0, 100)]
    return (theirs[1] - theirs[0]).abs().item(), (ours[1] - ours[0]).abs().item()


def sizes() -> str:
    """Values through a sigmoid; log q / beta in the free energy; the conditioner's factor with and without SiLU."""
    torch.manual_seed(0)
    x = torch.randn(4096, 32)
    squashed = x.sigmoid().std()
    positive = functional.normalize(functional.softplus(x), dim=-1)
    shift = ((positive * 32**0.5).log() / inverse_temperature(torch.zeros(1))).std()
    factors = [y.square().mean().sqrt() for y in (positive * 32**0.5, functional.silu(positive))]
    return (
        f"normal values after a sigmoid: standard deviation {squashed:.2f}; log q / beta: {shift:.2f}; "
        f"factor of the features: {factors[0]:.2f} of length sqrt(H_c), {factors[1]:.2f} as printed"
    )


def main() -> None:
    for line in shares():
        print(line)
    for line in (printed_lambda, printed_values, zero_embeddings, temperatures, decays):
        print(line())
    for length in (32, 64, 1024):
        error, ours = conditioner_by_quotient(length)
        print(f"conditioner as a quotient, {length} tokens: relative error {error:.2g}; recurrence {ours:.0e}")
    for length in (64, 256, 1024):
        print(f"cumulative gate clipped at -60, {length} tokens: mean error {gated_read_clipped(length):.2g}")
    print(f"shift by the maximum of the sequence: earlier reads move by {future_through_the_maximum():.2g}")
    print(f"padding by zeroed keys: 32 of 64 tokens keep {padding_by_zeroed_keys():.1%} of the weight")
    theirs, ours = rotation_by_other_pairs()
    print(
        f"rotary pairs of neighbours, frequencies of halves: a score moves by {theirs:.2g}; pairs of halves {ours:.0e}"
    )
    print(sizes())


if __name__ == "__main__":
    main()
