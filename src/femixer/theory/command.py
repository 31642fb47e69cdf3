"""`femixer theory`: the tables of docs/theory.md, and its two figures.

The paper's ways to read a past, from the freest to the cheapest ("A compute-expressivity trade-off path"), built and
counted: operations of matrix products, bytes that a pass writes, bytes that must be kept to read the next token.

    (0) general    o_t = f(x_1, ..., x_t)                     a two-layer MLP on the flattened, padded past
    (1) additive   o_t = sum_{i <= t} g(x_i, x_1, ..., x_t)   the same MLP with x_i in front, once for every pair
        FEM        o_t = g [(1 - lam) mu + lam F]             parts LTG on (2)'s prior
    (2) attention  o_t = sum_{i <= t} p_t(i) v_i
    (3) fixed      o_t = phi(q_t) S_t / phi(q_t) z_t          the prior `linear`, read by its mean
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from femixer.bench.calls import flops, held_bytes
from femixer.free_energy import posterior
from femixer.kernels.dispatch import use_backend
from femixer.mixer import FreeEnergyMixer
from femixer.options import check, parse
from femixer.reporting import Column, Group, Table, as_markdown
from femixer.reporting.figures import COLOURS, figure, looks, plain_log, quiet, save
from femixer.theory import minimal_degree, most_patterns, per_dimension_cost, tangent_kernels
from femixer.training import atomic
from femixer.training.results import check_no_run


class General(nn.Module):
    """x [1, T, dim] -> [1, T, dim]: an MLP reads each past, flattened and padded to `length` tokens."""

    def __init__(self, dim: int, length: int, additive: bool, **made: Any) -> None:
        super().__init__()
        self.length, self.additive = length, additive
        self.up = nn.Linear((length + additive) * dim, dim, **made)
        self.down = nn.Linear(dim, dim, **made)

    def forward(self, x: Tensor) -> Tensor:
        (tokens,), length = x, self.length
        causal = torch.ones(length, length, dtype=x.dtype, device=x.device).tril()
        pasts = (causal[:, :, None] * tokens).flatten(1)  # [T, T * dim]
        if not self.additive:
            return self.down(self.up(pasts).relu())[None]
        pairs = torch.cat([tokens.expand(length, -1, -1), pasts[:, None].expand(-1, length, -1)], -1)
        return (self.down(self.up(pairs).relu()) * causal[:, :, None]).sum(1)[None]


class NodeCost(NamedTuple):
    flops: int
    written: int  # bytes
    kept: int  # bytes


def nodes(dim: int, length: int, heads: int, **made: Any) -> dict[str, nn.Module]:
    """The five of them by name, for sequences of one length."""
    return {
        "(0) general map": General(dim, length, False, **made),
        "(1) additive map": General(dim, length, True, **made),
        "FEM, softmax prior": FreeEnergyMixer(dim, heads, "softmax", "LTG", **made),
        "(2) attention": FreeEnergyMixer(dim, heads, "softmax", "", **made),
        "(3) fixed state": FreeEnergyMixer(dim, heads, "linear", "", **made),
    }


def cost(node: nn.Module, dim: int, length: int) -> NodeCost:
    """Counted on tensors without data, in plain torch."""
    x = torch.empty(1, length, dim, device="meta")
    operations = flops(lambda: node(x))
    with torch.no_grad(), use_backend("plain"):
        with Written() as written:
            node(x)
        kept = x.numel() * x.element_size()  # a general map needs the tokens themselves
        if isinstance(node, FreeEnergyMixer):
            kept = held_bytes(node(x, return_state=True)[1].prior)
    return NodeCost(operations, written.bytes, kept)


class Written(TorchDispatchMode):
    """Bytes of the results of all operations but views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and result.untyped_storage()._cdata not in given:
                self.bytes += result.numel() * result.element_size()
        return results


def state_numbers(mixer: FreeEnergyMixer, tokens: int) -> int:
    """How many float32 numbers the prior of a stream holds after so many tokens; the mixer is on device="meta"."""
    with torch.no_grad(), use_backend("plain"):
        state = mixer(torch.empty(1, tokens, mixer.dim, device="meta"), return_state=True)[1]
    return held_bytes(state.prior) // 4


PRIORS = ("softmax", "linear", "gla", "aft", "decay", "ssm", "mamba")
TEMPERATURES = (0.0, 1.0, 4.0, 16.0)
DIM, HEADS, LENGTH = 512, 8, 1024


@dataclass(frozen=True)
class Command:
    """Print what the paper's appendix proves, as numbers of this library's layers, and draw two figures.

    A minute on two CPU cores. Operations and bytes are counted, not timed.
    """

    out: Path = Path("results/theory")
    """Folder for theory-kernel.png, theory-nodes.png and tables.md."""
    dim: int = 64
    """Width of the layers whose costs are counted."""
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    """Tokens at which they are counted, each twice the one before."""


def main(args: Sequence[str]) -> int:
    command = parse(Command, args, "theory")
    check(command.dim > 0 and command.dim % 8 == 0, "dim", command.dim, "a multiple of 8")
    doubled = [2 * length for length in command.lengths[:-1]]
    check([*command.lengths[1:]] == doubled != [], "lengths", command.lengths, "two or more, each twice the one before")
    check_no_run(command.out)
    command.out.mkdir(parents=True, exist_ok=True)
    start, unit = kernel_shares(unit=False), kernel_shares(unit=True)
    costs: Costs = {}
    for length in command.lengths:
        for name, node in nodes(command.dim, length, 4, device="meta").items():
            costs.setdefault(name, []).append((length, cost(node, command.dim, length)))
    tables = as_markdown(kernel_table(start, unit), node_table(costs), state_table(), score_table(), head_table())
    with atomic.replacing_files(command.out) as new:
        atomic.write(new / "tables.md", tables)
        save(kernel_figure(unit), new / "theory-kernel.png")
        save(node_figure(costs), new / "theory-nodes.png")
    print(tables)
    return 0


Shares = dict[str, dict[str, float]]


def kernel_shares(unit: bool, dim: int = 32, heads: int = 4, length: int = 12) -> Shares:
    """{prior: {group: its share of the trace of the tangent kernel}} on normal tokens, of layers as they start or with
    all matrices redrawn at unit gain, N(0, 1 / columns)."""
    shares = {}
    for prior in PRIORS:
        torch.manual_seed(0)
        mixer = FreeEnergyMixer(dim, heads, prior, dtype=torch.float64)
        for name, parameter in mixer.named_parameters():
            if unit and name.endswith(("weight", "modulation")):
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        x = torch.randn(length, dim, dtype=torch.float64)
        traces = {g: torch.einsum("tjtj->", k).item() for g, k in tangent_kernels(mixer, x).items()}
        shares[prior] = {group: trace / sum(traces.values()) for group, trace in traces.items()}
    return shares


def kernel_table(start: Shares, unit: Shares) -> Table:
    groups = [*next(iter(start.values()))]
    columns = [Column("layer"), *(Column(group, align="right") for group in groups)]
    blocks = [
        Group([[prior, *(f"{100 * of[group]:.2f}" for group in groups)] for prior, of in shares.items()], title)
        for title, shares in (("as it starts", start), ("matrices at unit gain", unit))
    ]
    return Table(columns, blocks, "Shares of the tangent kernel's trace, in percent")


Costs = dict[str, list[tuple[int, NodeCost]]]
"""{node: [(tokens, its costs)]}"""


def node_table(costs: Costs) -> Table:
    rows = []
    for name, of in costs.items():
        (_, before), (_, last) = of[-2:]
        shown = [f"{last.flops / 1e6:,.0f}", f"{last.written / 1e6:,.1f}", f"{last.kept / 1e3:,.1f}"]
        # By which power of the number of tokens it grows, at the last doubling.
        powers = [f"T^{math.log2(after / earlier):.2f}" for after, earlier in zip(last, before, strict=True)]
        rows.append([name, *(text for pair in zip(shown, powers, strict=True) for text in pair)])
    units = ("Mflop", "MB written", "kB kept")
    grows = [Column("grows as", f"{what}_power", "right") for what in NodeCost._fields]
    columns = ("node", *(column for pair in zip(units, grows, strict=True) for column in pair))
    return Table.of(columns, rows, f"One forward pass over {next(iter(costs.values()))[-1][0]} tokens")


def state_table() -> Table:
    """What a stream holds, and when attention's cache of 2 dim numbers a token is larger."""
    rows = []
    for prior in PRIORS:
        mixer = FreeEnergyMixer(DIM, HEADS, prior, device="meta")
        held, later = (state_numbers(mixer, tokens) for tokens in (LENGTH, 2 * LENGTH))
        channels = mixer.heads * mixer.widths.value
        tokens = "all" if later > held else f"{held / channels:.1f}"
        rows.append([prior, str(channels), f"{held:,}", tokens, f"{held / (2 * DIM):.1f}"])
    columns = (
        "prior",
        "value channels",
        f"numbers held at {LENGTH}",
        "tokens whose values fit",
        "attention's cache, tokens",
    )
    return Table.of(columns, rows, f"Stream states at dim {DIM}, {HEADS} heads, all parts")


def score_table() -> Table:
    """Attention, and scores for every channel."""
    shared = per_dimension_cost(DIM, LENGTH, HEADS, DIM // HEADS)
    rows = []
    for name, heads, width in (
        (f"attention, {HEADS} heads", HEADS, DIM // HEADS),
        ("a subspace per channel", DIM, DIM // HEADS),
        ("one number per channel", DIM, 1),
    ):
        own = per_dimension_cost(DIM, LENGTH, heads, width)
        rows.append([name, str(width), *(f"{a / 1e6:,.1f} ({a / b:.1f})" for a, b in zip(own, shared, strict=True))])
    columns = ("scores", "key width", "parameters, M", "flop, M", "weights p, M")
    return Table.of(columns, rows, f"Scores per dimension at dim {DIM}, {LENGTH} tokens (ratio to attention)")


def head_table() -> Table:
    """Patterns of selection and features of a head, by its width."""
    degree, rows = minimal_degree(5.0, 1e-6), []
    for heads in (1, 8, 64, 512):
        width = DIM // heads
        features = math.log10(math.comb(degree + width, width))
        rows.append([str(heads), str(width), f"10^{digits(most_patterns(LENGTH, DIM, heads))}", f"10^{features:.1f}"])
    columns = ("heads", "width", "patterns of argmax", "features for 1e-6 at scores within 5")
    alone = digits(most_patterns(LENGTH, DIM))
    return Table.of(columns, rows, f"{DIM} channels, {LENGTH} positions; every channel for itself: 10^{alone}")


def digits(count: int) -> int:
    """The power of ten below a number that is too large for a float."""
    return len(str(count)) - 1


def kernel_figure(shares: Shares) -> object:
    """Left: which parameters a layer learns by. Right: in how many ways the channels of a head weigh positions."""
    drawing = figure(10.0, 3.8)
    bars, ranks = drawing.subplots(1, 2, width_ratios=(1.25, 1))
    names, bottom = [*shares], torch.zeros(len(shares))
    for n, group in enumerate([*shares[names[0]]]):
        share = torch.tensor([shares[name].get(group, 0.0) for name in names])
        bars.bar(names, share, bottom=bottom, color=COLOURS[n], label=group, width=0.7)
        bottom += share
    bars.set_title("Shares of the tangent kernel, matrices at unit gain", loc="left")
    bars.set(ylim=(0, 1))
    bars.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    quiet(bars)
    # Singular values of the weights [channels, positions] of one token at each temperature, the largest set to one.
    torch.manual_seed(0)
    p, v = torch.randn(1, 48, dtype=torch.float64).softmax(-1), torch.randn(48, 32, dtype=torch.float64)
    for n, beta in enumerate(TEMPERATURES):
        values = torch.linalg.svdvals(posterior(p, v, beta)[0].T)
        label, shown = "mean: rank 1" if beta == 0 else f"beta {beta:g}", (values / values[0]).clamp_min(1e-4)
        ranks.plot(range(1, len(values) + 1), shown, color=COLOURS[n], marker="o", ms=3, label=label)
    ranks.set(yscale="log", ylim=(0.8e-4, 1.5), xlim=(0, 33), xlabel="number of the singular value")
    ranks.set_ylabel("relative to the largest, at least 1e-4")
    ranks.set_title("Channel-by-token weights of one read", loc="left")
    ranks.legend(frameon=False)
    quiet(ranks)
    return drawing


def node_figure(costs: Costs) -> object:
    """Left: operations against tokens. Right: what is kept for the next token."""
    drawing = figure(10.0, 3.8)
    axes = drawing.subplots(1, 2)
    for name, style in looks([*costs], "(2) attention").items():
        lengths = [length for length, _ in costs[name]]
        for ax, what, unit in ((axes[0], "flops", 1e6), (axes[1], "kept", 1e3)):
            ax.plot(lengths, [getattr(c, what) / unit for _, c in costs[name]], **style, markersize=4)
    for ax, title in zip(axes, ("Operations of a pass, Mflop", "Kept to read the next token, kB"), strict=True):
        ax.set(xscale="log", yscale="log", xlabel="tokens")
        ax.set_title(title, loc="left")
        plain_log(ax.xaxis)
        ax.set_xticks([length for length, _ in next(iter(costs.values()))])
        quiet(ax)
    axes[0].legend(frameon=False)
    return drawing
