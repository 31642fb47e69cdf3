"""arrange() against a plain loop: random ids, chunks, masks that come and go."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from femixer.kernels import marks as marks_of
from femixer.layout import Past, arrange


class Row:
    """One row of a stream, token by token."""

    def __init__(self) -> None:
        self.identity, self.segment, self.count = -1, -1, 0

    def token(self, identity: int) -> tuple[int, int]:
        """(segment, position) of the next token; a padding token has neither and changes nothing."""
        if identity < 0:
            return -1, -1
        if identity != self.identity:
            self.identity, self.segment, self.count = identity, self.segment + 1, 0
        self.count += 1
        return self.segment, self.count - 1


def ends_of(segments: list[int]) -> list[bool]:
    """Whether a token is real and no later real token is of its segment."""
    return [segment >= 0 and segment not in segments[t + 1 :] for t, segment in enumerate(segments)]


@st.composite
def streams(draw: st.DrawFn) -> tuple[int, list[tuple[str, list[list[int]]]]]:
    """A batch size and chunks (kind, ids [B][T]), where `plain` tokens have id 0 and a mask has ids 0 and -1: they
    continue the last segment."""
    batch = draw(st.integers(1, 3))
    chunks = []
    for _ in range(draw(st.integers(1, 4))):
        kind, length = draw(st.sampled_from(["plain", "mask", "segments"])), draw(st.integers(0, 8))
        ids = {"plain": st.just(0), "mask": st.integers(-1, 0), "segments": st.integers(-2, 3)}[kind]
        chunks.append((kind, [[draw(ids) for _ in range(length)] for _ in range(batch)]))
    return batch, chunks


@settings(max_examples=200, deadline=None, derandomize=True)
@given(streams())
def test_arrange_is_the_plain_loop(stream):
    batch, chunks = stream
    past, rows, seen = Past(), [Row() for _ in range(batch)], 0
    for kind, ids in chunks:
        length = len(ids[0])
        x = torch.zeros(batch, length, 1)
        tensor = torch.tensor(ids, dtype=torch.long).view(batch, length)
        mask, segments = (tensor >= 0 if kind == "mask" else None), (tensor if kind == "segments" else None)
        layout, past = arrange(x, mask, segments, past)
        seen += length
        wanted = []
        for row, line in zip(rows, ids, strict=True):
            last = max(row.identity, 0)
            wanted.append([row.token(i if kind == "segments" or i < 0 else last) for i in line])
        numbers = [[number for number, _ in line] for line in wanted]
        positions = [[position for _, position in line] for line in wanted]

        assert past.seen == seen
        position = layout.position.expand(batch, length)
        assert position.shape == (batch, length)
        if layout.segment is None:
            assert all(number == 0 for line in numbers for number in line)
            assert position.tolist() == positions
            continue
        real = layout.segment >= 0
        assert layout.segment.tolist() == numbers
        assert torch.where(real, position, -1).tolist() == positions
        assert (position >= 0).all()
        assert layout.padding.equal(~real)
        assert layout.starts.tolist() == [[p == 0 for p in line] for line in positions]
        assert layout.ends.tolist() == [ends_of(line) for line in numbers]
        marks = layout.marks()
        found = (marks_of.is_padding(marks), marks_of.is_start(marks), marks_of.is_end(marks))
        assert all(map(torch.equal, found, (layout.padding, layout.starts, layout.ends)))
        assert past.segment.tolist() == [row.segment for row in rows]
        assert past.tokens.tolist() == [row.count for row in rows]
        assert past.identity.tolist() == [row.identity for row in rows]


def test_tokens_without_mask_or_segments_need_no_segments():
    layout, past = arrange(torch.zeros(2, 5, 1), None, None, Past(7))
    assert layout.segment is None
    assert layout.position.tolist() == [[7, 8, 9, 10, 11]]
    assert past == Past(12)


def test_tokens_without_segments_continue_the_last_one():
    """A prompt of two packed documents, and then tokens of the second without saying so."""
    x = torch.zeros(1, 3, 1)
    _, past = arrange(x, None, torch.tensor([[4, 9, 9]]), Past())
    layout, past = arrange(x, None, None, past)
    assert layout.position.tolist() == [[2, 3, 4]]
    layout, past = arrange(x, torch.tensor([[False, True, True]]), None, past)
    assert layout.segment.tolist() == [[-1, 1, 1]]
    layout, past = arrange(x, None, torch.tensor([[9, 9, 4]]), past)
    assert layout.segment.tolist() == [[1, 1, 2]]


def test_a_segment_goes_on_after_a_hole_and_a_repeated_id_is_a_new_one():
    ids = torch.tensor([[3, 3, -1, 3, 5, 3, -9, -9, 3]])
    layout, past = arrange(torch.zeros(1, 9, 1), None, ids, Past())
    assert layout.segment.tolist() == [[0, 0, -1, 0, 1, 2, -1, -1, 2]]
    assert torch.where(layout.segment >= 0, layout.position, -1).tolist() == [[0, 1, -1, 2, 0, 0, -1, -1, 1]]
    assert layout.starts.nonzero()[:, 1].tolist() == [0, 4, 5]
    assert layout.ends.nonzero()[:, 1].tolist() == [3, 4, 8]
    assert (past.identity.item(), past.segment.item(), past.tokens.item()) == (3, 2, 2)


def test_ids_may_be_any_integers():
    ids = torch.tensor([[2**62, 2**62, 0, -(2**62)]])
    layout, _ = arrange(torch.zeros(1, 4, 1), None, ids, Past())
    assert layout.segment.tolist() == [[0, 0, 1, -1]]
