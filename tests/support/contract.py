"""What every mixer keeps, FEM with any prior or a rival: properties, each asked of a mixer (see matrix.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from matrix import BATCH, EXACT, MASK, ROUNDING, SEGMENTS, assert_close, outcome, separately, streamed, tokens
from torch import Tensor


def full_is_chunked(m: Any, sizes: Sequence[int]) -> None:
    x = tokens()
    assert_close(outcome(m, lambda x: streamed(m, x, sizes), x), outcome(m, m, x), EXACT)


def an_empty_chunk_changes_nothing(m: Any) -> None:
    x = tokens()
    assert_close({"y": streamed(m, x, [0, 5, 0, 0, 17, 1, 0])}, {"y": m(x)}, EXACT)


def what_was_made_for_inference_can_be_gone_on_from_with_gradients(m: Any) -> None:
    x = tokens()
    with torch.inference_mode():
        _, state = m(x[:, :5], return_state=True)
        _, state = m(x[:, 5:6], state=state, return_state=True)
    rest = outcome(m, lambda x: m(x[:, 6:], state=state, return_state=True)[0], x)
    assert_close({"y": rest["y"]}, {"y": m(x)[:, 6:].detach()}, EXACT)


def rows_of_a_state_go_on_as_their_own_batch(m: Any) -> None:
    """What beam search does: sequences are dropped and repeated in mid-stream, padded or not."""
    x, index = tokens(batch=len(MASK)), torch.tensor([2, 0, 2, 2])
    for mask in (None, MASK):
        first, rest, whole = (None if mask is None else part for part in (MASK[:, :9], MASK[index, 9:], MASK[index]))
        with torch.no_grad():
            _, state = m(x[:, :9], mask=first, return_state=True)
            continued, _ = m(x[index, 9:], mask=rest, state=state.rows(index), return_state=True)
            assert_close({"y": continued}, {"y": m(x[index], mask=whole)[:, 9:]}, EXACT)


def padded_is_unpadded(m: Any) -> None:
    x = tokens(batch=len(MASK))
    padded = outcome(m, lambda x: m(x, mask=MASK), x)
    assert_close(padded, outcome(m, lambda x: separately(m, x, MASK.long() - 1), x), EXACT)
    assert padded["y"][~MASK].count_nonzero() == 0
    assert padded["d x"][~MASK].count_nonzero() == 0


def packed_is_separate(m: Any) -> None:
    x = tokens()
    packed = outcome(m, lambda x: m(x, segments=SEGMENTS), x)
    assert_close(packed, outcome(m, lambda x: separately(m, x, SEGMENTS), x), EXACT)
    assert packed["y"][SEGMENTS < 0].count_nonzero() == 0


def a_mask_may_come_and_go_in_a_stream(m: Any) -> None:
    x, keep = tokens(batch=len(MASK)), MASK.clone()
    keep[:, :6] = keep[:, 16:] = True
    with torch.no_grad():
        first, state = m(x[:, :6], return_state=True)
        second, state = m(x[:, 6:16], mask=keep[:, 6:16], state=state, return_state=True)
        third, _ = m(x[:, 16:], state=state, return_state=True)
        wanted = separately(m, x, keep.long() - 1)
    assert_close({"y": torch.cat([first, second, third], 1)}, {"y": wanted}, EXACT)


def content_of_padding_is_irrelevant(m: Any, content: float) -> None:
    x = tokens(batch=len(MASK))
    changed = torch.where(MASK[..., None], x, x * content)
    for given in ({"mask": MASK}, {"segments": MASK.long() * 3 - 1}):
        before, after = (outcome(m, lambda x: m(x, **given), each) for each in (x, changed))  # noqa: B023
        assert all(torch.equal(before[name], after[name]) for name in before)


def nothing_but_padding_gives_zero(m: Any) -> None:
    x = tokens()
    result = outcome(m, lambda x: m(x, mask=torch.zeros(x.shape[:2], dtype=torch.bool)), x)
    assert result["y"].count_nonzero() == result["d x"].count_nonzero() == 0
    assert all(value.isfinite().all() for value in result.values())


def a_stream_that_begins_with_only_padding_begins_later(m: Any) -> None:
    x = tokens()
    with torch.no_grad():
        y, state = m(x[:, :9], mask=torch.zeros(BATCH, 9, dtype=torch.bool), return_state=True)
        later, _ = m(x[:, 9:], state=state, return_state=True)
        assert_close({"y": later}, {"y": m(x[:, 9:])}, EXACT)
    assert y.count_nonzero() == 0


def a_larger_future_leaves_the_past_alone(m: Any, start: int = 11, factor: float = 1e4) -> None:
    """m: in float32."""
    x = tokens(dtype=torch.float32)
    changed = x.clone()
    changed[:, start:] *= factor
    with torch.no_grad():
        y = m(changed)
        assert y.isfinite().all()
        assert_close({"y": y[:, :start]}, {"y": m(x)[:, :start]}, ROUNDING)


def the_past_has_no_gradient_in_the_future(m: Any, factor: float = 1.0) -> None:
    """factor: of the future tokens."""
    x = tokens()
    x[:, 12:] *= factor
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(m(x)[:, :12].sum(), x)
    assert gradient[:, 12:].count_nonzero() == 0
    assert gradient[:, :12].abs().amin(-1).min() > 0


def dropout_acts_in_training_on_what_goes_into_the_output_projection(m: Any) -> None:
    """m: with dropout=0.25."""
    x, seen = tokens(), list[Tensor]()
    m.out_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    m.eval()(x)
    torch.manual_seed(0)
    m.train()(x)
    read, dropped = seen
    kept = dropped != 0
    assert 0.7 < kept.double().mean() < 0.8
    assert_close({"read": dropped[kept]}, {"read": read[kept] / 0.75}, EXACT)
