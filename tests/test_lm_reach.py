"""`femixer lm reach`: losses by position and of repeats, by hand and through the command."""

import json
import math

import numpy as np
import pytest
import torch

from femixer.cli import main
from femixer.models import FEMForCausalLM
from femixer.tasks.lm.data.shards import IGNORED, Batch
from femixer.tasks.lm.runs import bounds, losses, places_of

WORDS = "abc abd abe xyz. "
COMPARE = "--hidden-size 8 --layers 1 --heads 1 --context 24 --batch-tokens 48 --threads 1"


def batch(ids: list[int], segments: list[int] | None = None) -> Batch:
    """Each token's target is the next one; the last has none."""
    segments = segments or [0] * len(ids)
    return Batch(*(torch.tensor([x]) for x in (ids, [*ids[1:], IGNORED], segments)))


def test_repeats_by_hand() -> None:
    #       a  b  c  a  b  c  a  b  d  a  b
    ids = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]
    position, repeats = places_of(batch(ids), 2)
    assert position.tolist() == [*range(10)]
    # Targets: 2 3 1 2 [3] [1] [2] 4 1 2: after "ab" came c, so c is a repeat and d is none; "da" stands there once.
    assert np.flatnonzero(repeats).tolist() == [4, 5, 6]
    # What followed last counts, not what followed first.
    assert np.flatnonzero(places_of(batch([1, 2, 3, 1, 2, 4, 1, 2, 4]), 2)[1]).tolist() == [7]


def test_documents_are_apart() -> None:
    position, repeats = places_of(batch([1, 2, 3, 1, 2, 3, 1, 2, 3], [0, 0, 0, 0, 1, 1, 1, 1, 1]), 1)
    assert position.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert np.flatnonzero(repeats).tolist() == [3, 7]  # "1 -> 2" within the first, "2 -> 3" within the second


@pytest.mark.parametrize(("context", "times"), [(256, 4), (7, 1), (1, 1), (13, 3), (64, 1)])
def test_stretches_cover_every_position_and_meet_at_the_training_length(context: int, times: int) -> None:
    found = bounds(context, context * times)
    assert found[0] == 0 and found[-1] == context * times and found == sorted({*found})
    assert context in found


def test_the_command(tmp_path, monkeypatch, capsys) -> None:
    """Its numbers are the definition's, by position and by kind, over the held-out text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(WORDS * 200)
    compare = f"lm compare --data text.txt --models SMAttn FEM-GLA --seeds 2 --steps 2 --out runs {COMPARE}"
    assert main(compare.split()) == 0
    reach = "lm reach --results runs --data text.txt --times 2 --repeat 3 --tokens None"
    command = reach.split()
    assert main([*command, "--out", "reach"]) == 0
    shown = capsys.readouterr().out
    records = json.loads((tmp_path / "reach" / "reach.json").read_text())
    assert [(r["model"], r["seed"]) for r in records] == [(m, s) for m in ("FEM-GLA", "SMAttn") for s in (0, 1)]
    assert {"table.md", "table.tex", "table.csv", "reach.png", "reach.json"} == {
        p.name for p in (tmp_path / "reach").iterdir()
    }
    model = FEMForCausalLM.from_pretrained(tmp_path / "runs" / "runs" / "FEM-GLA-seed-1" / "model")
    held_out = torch.tensor([[*(WORDS * 200).encode()]])[:, -170:]  # the end of the file, 5 %, is held out
    ids = torch.cat([torch.tensor([[model.config.bos_token_id]]), held_out], 1)
    windows = [ids[:, start : start + 49] for start in range(0, 170, 48)]
    expected = [[] for _ in records[1]["by_position"]]
    with torch.no_grad():
        for window in windows:
            log_p = model(window[:, :-1]).logits.double().log_softmax(-1)
            for t, target in enumerate(window[0, 1:].tolist()):
                stretch = max(n for n, low in enumerate(records[1]["bounds"]) if low <= t)
                expected[stretch].append(-float(log_p[0, t, target]))
    assert records[1]["by_position"] == pytest.approx([sum(each) / len(each) for each in expected], rel=1e-5)
    assert "repeats" in shown and f"{np.mean([r['repeats'] for r in records[:2]]):.3f}" in shown

    assert main([*command[:3], "runs", "runs", *command[4:]]) == 2
    assert "each model has each seed once" in capsys.readouterr().err
    assert main([*command, "--times", "1000"]) == 2
    assert "times=1000 is not allowed; choose at most 7" in capsys.readouterr().err
    (tmp_path / "other.txt").write_text(WORDS * 201)
    assert main([*command[:4], "--data", "other.txt"]) == 2
    assert "results='runs' is not allowed" in capsys.readouterr().err


def test_losses_of_a_uniform_model() -> None:
    class Uniform(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, inputs: torch.Tensor, **_: object) -> object:
            return type("Output", (), {"logits": torch.zeros(*inputs.shape, 5)})

    found = losses(Uniform(), batch([1, 2, 3, 4]))
    assert found.tolist() == pytest.approx([math.log(5)] * 3)
