"""FreeEnergyMixer: projections, conditioner, prior, read and gates (paper equation fem-unified)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from femixer.budget import solve_widths
from femixer.conditioner import TimeDecayConditioner
from femixer.gates import SMALL_BETA, SMALL_LAM, inverse_temperature, lam_logits, raw_temperature
from femixer.layer import MixerLayer
from femixer.layout import Layout, Past
from femixer.priors import Prior, build_prior, prior_class
from femixer.projection import Columns, Projection, start_map, starting
from femixer.state import State

if TYPE_CHECKING:
    from femixer.inspection import Inspection

PARTS = "CLTG"
GATES = ("lam", "gate")
STARTS = ("paper", "prior")
READOUTS = ("free_energy", "posterior_mean")
TEMPERATURES = ("learned", "fixed")


class Projected(NamedTuple):
    """Modulated projections of the tokens: the prior's inputs by name [B, T, width], values v [B, T, kv_heads, d_v],
    logits of the gates [B, T, heads, d_v] (None without the part), and the conditioner's next state."""

    inputs: dict[str, Tensor]
    v: Tensor
    lam: Tensor | None
    gate: Tensor | None
    context: Tensor | None


class FreeEnergyMixer(MixerLayer):
    """Sequence mixer [B, T, dim] -> [B, T, dim] that reads, per channel, between mean and free energy of a prior.

        o_t = g_t * [(1 - lam_t) E_p[v] + lam_t log(E_p[exp(beta_max v)]) / beta_max],   y_t = o_t W_o

    Args:
        dim: Width of the tokens.
        heads: Number of heads.
        prior: The distribution p over positions, by name (see docs/priors.md).
        parts: Any subset of C (conditioner), L (log-sum-exp, the free energy), T (temperature gate lam, needs L) and
            G (outer gate g). Without L the read is the mean; L without T is the free energy itself. parts="" with the
            softmax prior is standard attention.
        causal: Whether a token reads only itself and earlier tokens; otherwise every token reads all.
        budget: With any parts and prior the projections have as many parameters as those of standard attention, so
            gates make the values narrower. Queries and keys keep attention's width ("attention") or get that of the
            values ("balanced"). The conditioner adds about 5 % of a layer's parameters.
        value_dim: Width of the values over all heads, instead of the one that `budget` gives.
        kv_heads: Number of key/value heads, a divisor of heads; for priors with queries and keys.
        rope: Rotary positions; by default where the prior has queries and keys.
        window: A token reads only this many tokens, itself included (softmax, fox).
        bias: Whether the projections have biases.
        dropout: Probability of dropping numbers of the read.
        prior_options: The prior's own options.
        start: "paper" initializes all projections from N(0, 0.02), so lam starts near 1/2, and beta_max at 1.95.
            "prior" makes the layer start as its prior's mean read, to 1e-3 of the output: the projections of lam and
            g start at zero, g at 1 (to 1e-6), and lam at 1e-4 through a parameter `lam_odds` [heads, d_v] (see
            `lam_logits`). All of them receive gradients. L without T has no lam; there beta_max starts at 1e-3.
        readout: "free_energy" is the read above; "posterior_mean" replaces the free energy by E_q[v], with q
            proportional to p exp(beta_max v).
        temperature: "learned" has one beta_max per key/value head and channel; "fixed" sets beta_max = 1, without a
            parameter. With T, lam then chooses between the mean and F at beta = 1.
        device: Device of the parameters.
        dtype: Float type of the parameters.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        prior: str = "softmax",
        parts: str = PARTS,
        causal: bool = True,
        budget: str = "attention",
        value_dim: int | None = None,
        kv_heads: int | None = None,
        rope: bool | None = None,
        window: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        prior_options: dict[str, Any] | None = None,
        start: str = "paper",
        readout: str = "free_energy",
        temperature: str = "learned",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, causal, dropout)
        kv_heads = heads if kv_heads is None else kv_heads
        _check_arguments(heads, kv_heads, parts, value_dim, prior_options)
        check_read(parts, start, readout, temperature)
        kind = prior_class(prior)
        options = dict(prior_options or {})
        for name in ("rope", "window"):
            if name in options:
                raise ValueError(f"prior_options has {name}={options[name]!r}; give it as the mixer's own {name}=")
        if kind.queries_and_keys:
            options["rope"] = rope = True if rope is None else bool(rope)
        elif rope:
            raise ValueError(f"rope={rope} does not fit prior={prior!r}: it has no queries and keys")
        elif kv_heads != heads:
            raise ValueError(f"kv_heads={kv_heads} does not fit prior={prior!r}: it has no queries and keys")
        elif budget == "balanced":
            raise ValueError(
                f"budget={budget!r} does not fit prior={prior!r}: it has no queries and keys; choose 'attention'"
            )
        if window is not None:
            options["window"] = window
        options = kind.sized(dim, options)
        gates = sum(part in parts for part in "TG")
        own = None if kind.queries_and_keys else kind.own_columns(dim, heads, options)
        widths = solve_widths(dim, heads, kv_heads, gates, budget, value_dim, bool(rope), own)
        self.kv_heads, self.widths = kv_heads, widths
        self.parts, self.prior_name = "".join(p for p in PARTS if p in parts), prior
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.prior: Prior = build_prior(prior, heads, kv_heads, widths, causal, options, factory_kwargs)
        self._reads_on = causal and self.prior.reads_on
        self.start, self.readout, self.temperature = start, readout, temperature
        if start == "prior" and not self.prior.normalize and "L" in parts and "T" not in parts:
            raise ValueError("start='prior' does not fit normalize=False without T: no free energy is near that mean")

        value_columns = {"v": Columns(kv_heads * widths.value)}
        for part, name in zip("TG", GATES, strict=True):
            if part in parts:
                value_columns[name] = Columns(heads * widths.value, zero=start == "prior")
        self.conditioner: TimeDecayConditioner | None = None
        context = 0
        if "C" in parts:
            # d / 16, but at most what the softmax prior gets: the conditioner stays below 2 % of a model.
            context = max(4, min(heads * widths.value // 16, dim // 32))
            self.conditioner = TimeDecayConditioner(dim, context, causal, **factory_kwargs)
        columns = self.prior.columns()
        self.prior_proj = Projection(dim, columns, bias, context, **factory_kwargs) if columns else None
        self.value_proj = Projection(dim, value_columns, bias, context, **factory_kwargs)
        self.out_proj = starting(nn.Linear(heads * widths.value, dim, bias=bias, **factory_kwargs))
        temperatures = 1 if kind.one_temperature else widths.value
        self.raw_beta: nn.Parameter | None = None
        if "L" in parts and temperature == "learned":
            self.raw_beta = nn.Parameter(torch.empty(kv_heads, temperatures, **factory_kwargs))
        self.lam_odds: nn.Parameter | None = None
        if "T" in parts and start == "prior":
            self.lam_odds = nn.Parameter(torch.empty(heads, widths.value, **factory_kwargs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        start_map(self.out_proj)
        if self.raw_beta is not None:
            small = self.start == "prior" and "T" not in self.parts
            nn.init.constant_(self.raw_beta, raw_temperature(SMALL_BETA) if small else 0.0)
        if self.lam_odds is not None:
            nn.init.constant_(self.lam_odds, SMALL_LAM)

    def attention_maps(self) -> list[Tensor]:
        """Weights of the projections that attention has too (scores, values, output), each [out, in], sharing memory
        with the parameters. A model may initialize these in its own way; the initialization of gates, decays,
        temperatures and conditioner belongs to the mixer."""
        found = [self.out_proj.weight.detach()]
        for projection in (self.prior_proj, self.value_proj):
            if projection is not None:
                rows = projection.linear.weight.detach().split(projection.widths)
                named = zip(projection.columns.items(), rows, strict=True)
                found += [map_ for (name, columns), map_ in named if not columns.additive and name not in GATES]
        return found

    def _beta(self) -> Tensor | None:
        """[kv_heads, d_v], positive; None without L."""
        if "L" not in self.parts:
            return None
        if self.raw_beta is None:
            weight = self.out_proj.weight
            return torch.ones(self.kv_heads, self.widths.value, device=weight.device, dtype=weight.dtype)
        beta = inverse_temperature(self.raw_beta)
        return beta if beta.shape[1] == self.widths.value else beta.expand(-1, self.widths.value)

    @property
    def beta_max(self) -> Tensor:
        """Largest inverse temperature [heads, d_v], positive; zero where the mixer reads the mean (no part L)."""
        beta = self._beta()
        if beta is None:
            weight = self.out_proj.weight
            return torch.zeros(self.heads, self.widths.value, device=weight.device, dtype=weight.dtype)
        return beta.repeat_interleave(self.heads // self.kv_heads, 0)

    def mixed(self, x: Tensor, layout: Layout, before: State, keep: bool) -> tuple[Tensor, Any, Tensor | None]:
        inputs, v, lam, gate, context = self._project(x, layout, before.conditioner)
        read, memory = self.prior(inputs, v, self._beta(), lam, gate, layout, before.prior, keep, self.readout)
        return self.out_proj(self.dropout(read.flatten(-2).to(x.dtype))), memory, context

    def _project(self, x: Tensor, layout: Layout, context: Tensor | None) -> Projected:
        features = None
        if self.conditioner is not None:
            features, context = self.conditioner(x, layout, context)
        return self._columns(x, features, context)

    def _columns(self, x: Tensor, features: Tensor | None, context: Tensor | None) -> Projected:
        inputs = {} if self.prior_proj is None else self.prior_proj(x, features)
        values = self.value_proj(x, features)
        heads = {name: columns.unflatten(-1, (-1, self.widths.value)) for name, columns in values.items()}
        lam = heads.get("lam")
        if lam is not None and self.lam_odds is not None:
            lam = lam_logits(lam, self.lam_odds)
        return Projected(inputs, heads["v"], lam, heads.get("gate"), context)

    def prepare(
        self, x: Tensor, mask: Tensor | None = None, segments: Tensor | None = None
    ) -> tuple[Projected, Layout]:
        """The inputs of prior and gates in `mixed`, for inspection and for tests of priors."""
        self.check_inputs(x, mask, segments, None, False)
        layout, _ = self.arrange(x, mask, segments, Past())
        if layout.padding is not None:
            x = x.masked_fill(layout.padding[..., None], 0)
        return self._project(x, layout, None), layout

    def inspect(self, x: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Inspection:
        """Where the mixer reads, by position and channel (see femixer.inspection)."""
        from femixer.inspection import inspect_mixer

        return inspect_mixer(self, x, mask, segments)

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, heads={self.heads}, prior={self.prior_name!r}, parts={self.parts!r}, "
            f"causal={self.causal}, key width={self.widths.key}, value width={self.widths.value}"
        )


def check_read(parts: str, start: str, readout: str, temperature: str) -> None:
    """Raise a ValueError unless these options are known and compatible."""
    given = ("start", start, STARTS), ("readout", readout, READOUTS), ("temperature", temperature, TEMPERATURES)
    for name, value, known in given:
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")
        if name != "start" and value != known[0] and "L" not in parts:
            raise ValueError(f"{name}={value!r} does not fit parts={parts!r}: without L the read is the mean")
    if start == "prior" and "L" in parts and "T" not in parts and temperature == "fixed":
        raise ValueError(f"start='prior' does not fit parts={parts!r} with temperature='fixed': F at 1 is no mean")


def _check_arguments(
    heads: int,
    kv_heads: int,
    parts: str,
    value_dim: int | None,
    prior_options: dict[str, Any] | None,
) -> None:
    if not isinstance(kv_heads, int) or isinstance(kv_heads, bool) or kv_heads < 1:
        raise ValueError(f"kv_heads={kv_heads!r} must be a positive integer")
    if heads % kv_heads:
        raise ValueError(f"heads={heads} is not divisible by kv_heads={kv_heads}")
    if not isinstance(parts, str):
        raise TypeError(f"parts must be a string of letters from {PARTS!r}, not {parts!r}")
    unknown = sorted(set(parts) - set(PARTS))
    if unknown or len(set(parts)) != len(parts):
        raise ValueError(f"parts={parts!r} is not a set of letters from {PARTS!r}")
    if "T" in parts and "L" not in parts:
        raise ValueError(f"parts={parts!r}: T (temperature) needs L (log-sum-exp)")
    if value_dim is not None and (not isinstance(value_dim, int) or isinstance(value_dim, bool)):
        raise TypeError(f"value_dim={value_dim!r} must be an integer or None")
    if prior_options is not None and not isinstance(prior_options, dict):
        raise TypeError(f"prior_options={prior_options!r} must be a dict of the prior's options or None")
