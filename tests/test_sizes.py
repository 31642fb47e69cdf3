"""What cannot fit is refused before it is made, and what takes long says how far it is."""

import pytest
import torch
from lm_text import texts

from femixer import memory
from femixer.cli import main
from femixer.training import journal


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["lm", "train", "--data", "text.txt", "--heads", "4", "--hidden-size", "100000"], "hidden_size=100000"),
        (["vision", "train", "--heads", "4", "--width", "100000", "--parameters", "None"], "width=100000"),
        (
            ["forecast", "train", "--data", "rows.csv", "--lookback", "9", "--horizon", "6", "--width", "100000"],
            "width=100000",
        ),
    ],
)
def test_a_model_larger_than_the_machine_is_refused_before_it_is_made(tmp_path, monkeypatch, capsys, command, option):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(texts(97)))
    rows = "".join(f"2020-01-01 {minute // 60:02d}:{minute % 60:02d},{minute % 7}\n" for minute in range(900))
    (tmp_path / "rows.csv").write_text("date,a\n" + rows)
    assert main([*command, "--out", "run"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{option} is not allowed; choose smaller sizes: " in error and "and this machine has" in error
    assert not (tmp_path / "run").exists()


def test_the_memory_of_a_container_counts(tmp_path, monkeypatch):
    whole = memory.installed()
    assert whole > 10**8 and 0 < memory.free(torch.device("cpu")) <= whole
    for content, expected in (("max\n", whole), ("12345\n", 12345)):
        (tmp_path / "memory.max").write_text(content)
        monkeypatch.setattr(memory, "LIMITS", (tmp_path / "memory.max", tmp_path / "nowhere"))
        assert memory.installed() == expected


def test_progress_is_a_line_now_and_then_also_where_the_end_is_not_known(monkeypatch, capsys):
    monkeypatch.setattr(journal, "SECONDS_BETWEEN_LINES", 0.0)
    with journal.counting(7, "windows") as told:
        told(3)
    with journal.counting(None, "bytes") as told:
        told(1000)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("3 of 7 windows, ") and first.endswith(" s left")
    assert second == "1,000 bytes"
