"""What cannot fit is refused before it is made, and what takes long says how far it is."""

import pytest
import torch
from lm_text import texts

from femixer.cli import main
from femixer.training import engine, journal


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["lm", "train", "--data", "text.txt", "--heads", "4", "--hidden-size", "100000"], "hidden_size=100000"),
        (["vision", "train", "--heads", "4", "--width", "100000", "--parameters", "None"], "width=100000"),
        (["vision", "run", "--heads", "4", "--width", "100000", "--parameters", "None"], "width=100000"),
        (["mad", "run", "--tasks", "recall", "--vocabulary", "1000000000"], "vocabulary=1000000000"),
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
    whole = engine.installed_bytes()
    assert whole > 10**8 and 0 < engine.free_bytes(torch.device("cpu")) <= whole
    for folder, (limit, used, of_files) in engine.GROUPS.items():
        monkeypatch.setattr(engine, "GROUPS", {tmp_path: (limit, used, of_files), folder / "nowhere": ("a", "b", "c")})
        for content, expected, free in (("max\n", whole, None), ("12345\n", 12345, 12345 - 11000 + 700)):
            (tmp_path / limit).write_text(content)
            (tmp_path / used).write_text("11000\n")
            (tmp_path / "memory.stat").write_text(f"anon 10300\n{of_files} 700\n")
            assert engine.installed_bytes() == expected
            assert free is None or engine.free_bytes(torch.device("cpu")) == free
        (tmp_path / used).write_text("13200\n")  # for a moment, before something is given back
        assert engine.free_bytes(torch.device("cpu")) == 0
        (tmp_path / used).unlink()
        assert engine.free_bytes(torch.device("cpu")) == engine.installed_bytes() == 12345


def test_progress_is_a_line_now_and_then_also_where_the_end_is_not_known(monkeypatch, capsys):
    monkeypatch.setattr(journal, "SECONDS_BETWEEN_LINES", 0.0)
    with journal.counting(7, "windows") as told:
        told(3)
    with journal.counting(None, "bytes") as told:
        told(1000)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("3/7 windows, ") and first.endswith(" s left")
    assert second == "1,000 bytes"
