"""Widths for a parameter budget: every mixer has as many parameters as standard attention, for any prior and parts.

With n = [T] + [G] gates and r = kv_heads / heads (1 without grouping), standard attention has 2 (1 + r) dim columns:
queries and output 1 each, keys and values r each. A mixer with values, output and gates of width d has

    (1 + r) * key width + (1 + n + r) * d

columns; equating the two gives d. Without grouping that is (2 + n) d + 2 * key width = 4 dim.
"""

from __future__ import annotations

from femixer.priors.base import Widths

BUDGETS = ("attention", "balanced")


def solve_widths(
    dim: int,
    heads: int,
    kv_heads: int,
    gates: int,
    budget: str,
    value_dim: int | None,
    rope: bool,
    own_columns: tuple[float, float] | None = None,
) -> Widths:
    """Widths per head. budget="attention": queries and keys have width dim; "balanced": width d. With value_dim given,
    they get the remaining columns.

    own_columns: columns of a prior without queries and keys, (in total, per value channel); `budget` makes no
    difference there.
    """
    if budget not in BUDGETS:
        raise ValueError(f"budget={budget!r} is unknown; choose one of {', '.join(BUDGETS)}")
    r = kv_heads / heads
    total, per_value = 2 * (1 + r) * dim, 1 + gates + r

    if own_columns is not None:
        in_all, per_channel = own_columns
        # At least one value channel per head, even if the prior's columns use up the budget of a small dim.
        fitting = max(1, round((total - in_all) / (per_value + per_channel) / heads))
        if value_dim is None:
            return Widths(0, fitting)
        _check_value_dim(value_dim, heads)
        if value_dim > fitting * heads:
            raise ValueError(
                f"value_dim={value_dim} is beyond the parameters of attention at dim={dim} with {gates} gates; "
                f"at most {fitting * heads} is possible"
            )
        return Widths(0, value_dim // heads)

    def key_width(value_width: int) -> int:
        width = (total - per_value * value_width * heads) / (1 + r) / heads
        return 2 * round(width / 2) if rope else round(width)

    if value_dim is not None:
        _check_value_dim(value_dim, heads)
        widths = Widths(key_width(value_dim // heads), value_dim // heads)
        if widths.key < 1:
            most = next((m for m in range(value_dim - heads, 0, -heads) if key_width(m // heads) >= 1), 0)
            raise ValueError(
                f"value_dim={value_dim} leaves no parameters for queries and keys at dim={dim} with {gates} gates; "
                f"at most {most} is possible"
            )
        return widths
    if budget == "attention":
        value = max(1, round((1 + r) * dim / per_value / heads))
        key = dim // heads
        return Widths(key + key % 2 if rope else key, value)
    value = max(1, round(total / (1 + r + per_value) / heads))
    return Widths(max(key_width(value), 2 if rope else 1), value)


def _check_value_dim(value_dim: int, heads: int) -> None:
    if value_dim < 1 or value_dim % heads:
        raise ValueError(f"value_dim={value_dim} must be a positive multiple of heads={heads}")
