"""What every mixer keeps, FEM with any prior or a rival: tests of the mixers that a subclass is parametrized over."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from typing import Any

import pytest
import torch
from matrix import (
    BATCH,
    DIM,
    EXACT,
    LENGTH,
    MASK,
    ROUNDING,
    SEGMENTS,
    assert_close,
    outcome,
    separately,
    streamed,
    tokens,
)
from torch import Tensor

CHUNKS = {"chunks": [1, 4, 9, 1, 8], "halves": [12, 11], "tokens": [1] * LENGTH}
X, WHOLE = torch.zeros(3, 5, DIM), torch.ones(3, 5, dtype=torch.bool)
# Error, what its message has, inputs besides X or instead of it.
WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "x|(3, 24)|24]", {"x": X[:, 0]}),
    (ValueError, "x|(3, 5, 23)|24]", {"x": X[..., 1:]}),
    (TypeError, "x|int64|float", {"x": X.long()}),
    (TypeError, "x|float64|float32", {"x": X.double()}),
    (TypeError, "x|list|tensor", {"x": X.tolist()}),
    (ValueError, "mask|(3, 4)|(3, 5)", {"mask": WHOLE[:, 1:]}),
    (TypeError, "mask|float32|bool", {"mask": WHOLE.float()}),
    (TypeError, "mask|int64|bool", {"mask": WHOLE.long()}),
    (TypeError, "mask|list|tensor", {"mask": WHOLE.tolist()}),
    (ValueError, "mask|meta|cpu", {"mask": WHOLE.to("meta")}),
    (ValueError, "segments|(3, 5, 1)|(3, 5)", {"segments": WHOLE.long()[..., None]}),
    (TypeError, "segments|float32|integer", {"segments": WHOLE.float()}),
    (TypeError, "segments|bool|integer", {"segments": WHOLE}),
    (ValueError, "segments|meta|cpu", {"segments": WHOLE.long().to("meta")}),
    (ValueError, "mask|segments|both", {"mask": WHOLE, "segments": WHOLE.long()}),
    (TypeError, "state|dict|return_state", {"state": {}}),
]


def assert_streams(m: Any, x: Tensor, wanted: dict[str, Tensor], **layout: Tensor) -> None:
    """In chunks of every kind, with gradients and without."""
    for sizes in CHUNKS.values():
        assert_close(outcome(m, lambda x: streamed(m, x, sizes, **layout), x), wanted, EXACT)  # noqa: B023
        with torch.no_grad():
            assert_close({"y": streamed(m, x, sizes, **layout)}, {"y": wanted["y"]}, EXACT)


class EveryMixer:
    """variant: has `build(**options)`, which makes the mixer, `encodes`, whether causal=False is one of these, and
    `rounding`, what float32 may do to a result, relative to the largest."""

    @pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
    def test_full_is_chunked_is_token_by_token(self, variant: Any, sizes: list[int]) -> None:
        m, x = variant.build(), tokens()
        assert_close(outcome(m, lambda x: streamed(m, x, sizes), x), outcome(m, m, x), EXACT)

    @pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_without_gradients_a_growing_cache_gives_the_same(self, variant: Any, sizes: list[int], mode: Any) -> None:
        m, x = variant.build(dtype=torch.float32), tokens(dtype=torch.float32)
        with mode():
            y = streamed(m, x, sizes)
            assert y.dtype == x.dtype
            assert_close({"y": y}, {"y": m(x)}, variant.rounding)

    @pytest.mark.parametrize(
        ("mode", "prefix"),
        [
            (torch.enable_grad, [7]),
            (torch.no_grad, [7]),
            (torch.no_grad, [3, 1, 1, 2]),
            (torch.inference_mode, [3, 1, 1, 2]),
        ],
    )
    def test_two_continuations_of_one_state_are_both_right(self, variant: Any, mode: Any, prefix: list[int]) -> None:
        """A state is a value, also where the caches of several states share one growing buffer, as they do without
        gradients after steps."""
        m, x, other = variant.build(), tokens(), tokens(seed=2)
        other[:, :7] = x[:, :7]
        with mode():
            wanted, wanted_other = m(x), m(other)
            state = None
            for part in x[:, :7].split(prefix, 1):
                _, state = m(part, state=state, return_state=True)
            first, state_one = m(x[:, 7:8], state=state, return_state=True)
            second, state_two = m(other[:, 7:8], state=state, return_state=True)
            results = [first], [second]
            for t in range(8, LENGTH):
                y, state_one = m(x[:, t : t + 1], state=state_one, return_state=True)
                results[0].append(y)
                y, state_two = m(other[:, t : t + 1], state=state_two, return_state=True)
                results[1].append(y)
            again, _ = m(x[:, 7:], state=state, return_state=True)
        assert_close({"y": torch.cat(results[0], 1)}, {"y": wanted[:, 7:]}, EXACT)
        assert_close({"y": torch.cat(results[1], 1)}, {"y": wanted_other[:, 7:]}, EXACT)
        assert_close({"y": again}, {"y": wanted[:, 7:]}, EXACT)

    def test_a_state_is_not_changed_by_going_on_from_it(self, variant: Any) -> None:
        m, x = variant.build(), tokens()
        with torch.no_grad():
            _, state = m(x[:, :9], return_state=True)
            first, _ = m(x[:, 9:], state=state, return_state=True)
            m(x[:, 9:] * 100, state=state, return_state=True)
            second, _ = m(x[:, 9:], state=state, return_state=True)
        assert torch.equal(first, second)

    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
    def test_an_empty_chunk_changes_nothing(self, variant: Any, mode: Any) -> None:
        m, x = variant.build(), tokens()
        with mode():
            assert_close({"y": streamed(m, x, [0, 5, 0, 0, 17, 1, 0])}, {"y": m(x)}, EXACT)

    def test_what_was_made_for_inference_can_be_gone_on_from_with_gradients(self, variant: Any) -> None:
        m, x = variant.build(), tokens()
        with torch.inference_mode():
            _, state = m(x[:, :5], return_state=True)
            _, state = m(x[:, 5:6], state=state, return_state=True)
        rest = outcome(m, lambda x: m(x[:, 6:], state=state, return_state=True)[0], x)
        assert_close({"y": rest["y"]}, {"y": m(x)[:, 6:].detach()}, EXACT)

    def test_rows_of_a_state_go_on_as_their_own_batch(self, variant: Any) -> None:
        """What beam search does: sequences are dropped and repeated in mid-stream, padded or not."""
        m, x, index = variant.build(), tokens(batch=len(MASK)), torch.tensor([2, 0, 2, 2])
        for mask in (None, MASK):
            parts = (MASK[:, :9], MASK[index, 9:], MASK[index])
            first, rest, whole = (None if mask is None else part for part in parts)
            with torch.no_grad():
                _, state = m(x[:, :9], mask=first, return_state=True)
                continued, _ = m(x[index, 9:], mask=rest, state=state.rows(index), return_state=True)
                assert_close({"y": continued}, {"y": m(x[index], mask=whole)[:, 9:]}, EXACT)

    def test_padded_is_unpadded(self, variant: Any) -> None:
        m, x = variant.build(), tokens(batch=len(MASK))
        padded = outcome(m, lambda x: m(x, mask=MASK), x)
        assert_close(padded, outcome(m, lambda x: separately(m, x, MASK.long() - 1), x), EXACT)
        assert padded["y"][~MASK].count_nonzero() == 0
        assert padded["d x"][~MASK].count_nonzero() == 0

    def test_a_padded_stream_is_unpadded(self, variant: Any) -> None:
        m, x = variant.build(), tokens(batch=len(MASK))
        assert_streams(m, x, outcome(m, lambda x: separately(m, x, MASK.long() - 1), x), mask=MASK)

    def test_segments_may_be_split_over_chunks(self, variant: Any) -> None:
        m, x = variant.build(), tokens()
        assert_streams(m, x, outcome(m, lambda x: separately(m, x, SEGMENTS), x), segments=SEGMENTS)

    def test_packed_is_separate(self, variant: Any) -> None:
        m, x = variant.build(), tokens()
        packed = outcome(m, lambda x: m(x, segments=SEGMENTS), x)
        assert_close(packed, outcome(m, lambda x: separately(m, x, SEGMENTS), x), EXACT)
        assert packed["y"][SEGMENTS < 0].count_nonzero() == 0

    def test_a_mask_may_come_and_go_in_a_stream(self, variant: Any) -> None:
        m, x, keep = variant.build(), tokens(batch=len(MASK)), MASK.clone()
        keep[:, :6] = keep[:, 16:] = True
        with torch.no_grad():
            first, state = m(x[:, :6], return_state=True)
            second, state = m(x[:, 6:16], mask=keep[:, 6:16], state=state, return_state=True)
            third, _ = m(x[:, 16:], state=state, return_state=True)
            wanted = separately(m, x, keep.long() - 1)
        assert_close({"y": torch.cat([first, second, third], 1)}, {"y": wanted}, EXACT)

    @pytest.mark.parametrize("given", [{"mask": MASK}, {"segments": MASK.long() * 3 - 1}], ids=["mask", "segments"])
    def test_content_of_padding_is_irrelevant(self, variant: Any, given: dict[str, Tensor]) -> None:
        x = tokens(batch=len(MASK))
        for m in both(variant):
            before = outcome(m, lambda x: m(x, **given), x)  # noqa: B023
            for content in (1e4, torch.inf, torch.nan):
                changed = torch.where(MASK[..., None], x, x * content)
                after = outcome(m, lambda x: m(x, **given), changed)  # noqa: B023
                assert all(torch.equal(before[name], after[name]) for name in before), content

    def test_nothing_but_padding_gives_zero(self, variant: Any) -> None:
        for m in both(variant):
            found = outcome(m, lambda x: m(x, mask=torch.zeros(x.shape[:2], dtype=torch.bool)), tokens())  # noqa: B023
            assert found["y"].count_nonzero() == found["d x"].count_nonzero() == 0
            assert all(value.isfinite().all() for value in found.values())

    def test_a_stream_that_begins_with_only_padding_begins_later(self, variant: Any) -> None:
        m, x = variant.build(), tokens()
        with torch.no_grad():
            y, state = m(x[:, :9], mask=torch.zeros(BATCH, 9, dtype=torch.bool), return_state=True)
            later, _ = m(x[:, 9:], state=state, return_state=True)
            assert_close({"y": later}, {"y": m(x[:, 9:])}, EXACT)
        assert y.count_nonzero() == 0

    @torch.no_grad()
    def test_a_larger_future_leaves_the_past_alone(self, variant: Any) -> None:
        m, x = variant.build(dtype=torch.float32), tokens(dtype=torch.float32)
        wanted = m(x)
        for factor, start in product((1e2, 1e4), (11, LENGTH - 1)):
            changed = x.clone()
            changed[:, start:] *= factor
            y = m(changed)
            assert y.isfinite().all()
            assert_close({"y": y[:, :start]}, {"y": wanted[:, :start]}, ROUNDING)

    def test_the_past_has_no_gradient_in_the_future(self, variant: Any) -> None:
        m, x = variant.build(), tokens()
        x[:, 12:] *= 1e3
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(m(x)[:, :12].sum(), x)
        assert gradient[:, 12:].count_nonzero() == 0
        assert gradient[:, :12].abs().amin(-1).min() > 0

    def test_dropout_acts_in_training_on_what_goes_into_the_output_projection(self, variant: Any) -> None:
        m, x, seen = variant.build(dropout=0.25), tokens(), list[Tensor]()
        m.out_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        m.eval()(x)
        torch.manual_seed(0)
        m.train()(x)
        read, dropped = seen
        kept = dropped != 0
        assert 0.7 < kept.double().mean() < 0.8
        assert_close({"read": dropped[kept]}, {"read": read[kept] / 0.75}, EXACT)

    def test_copies_are_mixers_of_their_own(self, variant: Any) -> None:
        """Layers of a model are often made by deepcopy; a state of one is none of the other."""
        m, x = variant.build(), tokens()
        before, (_, state) = m(x), m(x, return_state=True)
        for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
            assert torch.equal(other(x), before)
            with torch.no_grad():
                other.out_proj.weight.mul_(2)
            assert torch.equal(m(x), before)
            with pytest.raises(ValueError, match="state belongs to another mixer"):
                other(x, state=state, return_state=True)

    def test_no_sequences_and_no_tokens(self, variant: Any) -> None:
        layouts = ({}, {"mask": MASK[:BATCH]}, {"segments": SEGMENTS})
        for m, layout, (rows, columns) in product(both(variant), layouts, ((0, LENGTH), (BATCH, 0))):
            empty = tokens()[:rows, :columns].requires_grad_()
            given = {name: ids[:rows, :columns] for name, ids in layout.items()}
            y = m(empty, **given)
            assert y.shape == empty.shape
            if m.causal:
                assert torch.equal(m(empty, **given, return_state=True)[0], y)
            y.sum().backward()
            assert all(p.grad is None or p.grad.count_nonzero() == 0 for p in m.parameters())

    def test_batch_of_one_is_a_row_of_a_batch(self, variant: Any) -> None:
        x = tokens()
        for m in both(variant):
            assert_close({"y": torch.cat([m(row[None]) for row in x])}, {"y": m(x)}, EXACT)

    def test_a_first_token_is_read_alone(self, variant: Any) -> None:
        m, x = variant.build(), tokens()
        assert_close({"y": m(x[:, :1])}, {"y": m(x)[:, :1]}, EXACT)

    def test_wrong_inputs_are_named_with_what_came_and_what_is_allowed(self, variant: Any) -> None:
        m = variant.build(dtype=torch.float32)
        for error, words, inputs in WRONG:
            with pytest.raises(error) as raised:
                m(**{"x": X, **inputs})
            assert all(word in str(raised.value) for word in words.split("|")), str(raised.value)

    def test_a_state_that_does_not_fit_is_refused(self, variant: Any) -> None:
        m, other = (variant.build(dtype=torch.float32) for _ in range(2))
        (_, state), (_, others) = m(X, return_state=True), other(X, return_state=True)
        with pytest.raises(ValueError, match="state belongs to another mixer"):
            m(X, state=others)
        with pytest.raises(ValueError, match="state has batch size 3; x has 2"):
            m(X[:2], state=state)
        with pytest.raises(ValueError, match="state is on cpu; x is on meta"):
            m(X.to("meta"), state=state)


class EveryEncoder:
    def test_every_token_sees_every_other(self, variant: Any) -> None:
        m, x = variant.build(causal=False), tokens(batch=1, length=4).requires_grad_()
        for t in range(4):
            (gradient,) = torch.autograd.grad(m(x)[:, t].sum(), x)
            assert gradient.abs().amin(-1).min() > 0

    def test_padded_and_packed_is_separate(self, variant: Any) -> None:
        m = variant.build(causal=False)
        for given, ids in (({"mask": MASK}, MASK.long() - 1), ({"segments": SEGMENTS}, SEGMENTS)):
            x = tokens(batch=len(ids))
            found = outcome(m, lambda x: m(x, **given), x)  # noqa: B023
            assert_close(found, outcome(m, lambda x: separately(m, x, ids), x), EXACT)  # noqa: B023
            assert found["y"][ids < 0].count_nonzero() == 0

    def test_it_has_no_state(self, variant: Any) -> None:
        m = variant.build(causal=False, dtype=torch.float32)
        _, state = variant.build(dtype=torch.float32)(X, return_state=True)
        for given in ({"return_state": True}, {"state": state}):
            with pytest.raises(ValueError, match=r"state.*causal=True.*causal=False"):
                m(X, **given)


def both(variant: Any) -> list[Any]:
    """Causal, and as an encoder where it can be one."""
    return [variant.build(), *([variant.build(causal=False)] if variant.encodes else [])]
