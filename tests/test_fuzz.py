"""No damaged folder and no impossible option ends in a traceback, or in a result that is not one: see fuzz.py."""

import itertools
from pathlib import Path

import pytest
from fuzz import Case, Trial, cases, make, started

COUNT, SEED, STARTED = 300, 20, 20
# Commands that start quickly enough to be started so often.
QUICK = ("evaluated", "language", "upgraded", "run")


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    place = tmp_path_factory.mktemp("fuzz")
    return Trial(make(place), place / "trial")


def test_damaged_folders_and_impossible_options_are_one_line_or_change_nothing(trial: Trial) -> None:
    problems = [f"{case.subject}: {case.told}\n{problem}" for case in cases(trial.subjects, COUNT - STARTED, SEED)
                if (problem := trial.run(case)) is not None]  # fmt: skip
    assert not problems, "\n".join(problems)


def test_so_are_they_where_the_command_is_started(trial: Trial) -> None:
    quick = {name: trial.subjects[name] for name in QUICK}
    problems = [f"{case.subject}: {case.told}\n{problem}" for case in itertools.islice(early(quick), STARTED)
                if (problem := trial.run(case, started)) is not None]  # fmt: skip
    assert not problems, "\n".join(problems)


def early(subjects: dict[str, object]) -> "itertools.chain[Case]":
    """Damage that is found before a model is built: what remains is to see that the message gets out."""
    found = (case for case in cases(subjects, 100 * STARTED, SEED + 1) if case.file.endswith(".json"))
    return itertools.chain(case for case in found if case.content in (None, b"") or b"NaN" not in case.content)


def test_a_wrong_result_and_a_traceback_are_found(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the two tests above would say if nobody looked at the file."""
    case = Case("evaluated", ("lm", "table", "FOLDER", "--out", "OUT"), "nothing", True, "results.json", b"[]")
    assert trial.run(case) is None
    monkeypatch.setattr("femixer.tasks.lm.table.check_fields", lambda content, *rest: content)
    assert "unexpected" in str(trial.run(case))
    other = (Path(trial.subjects["evaluated"].folder) / "results.json").read_bytes().replace(b"0.25", b'"0.5"')
    assert trial.run(Case(case.subject, case.command, "text", True, case.file, other)) is not None


def test_saved_folders_have_filled_cards(trial: Trial) -> None:
    for name, own in (("run", "model/README.md"), ("upgraded", "README.md")):
        text = (trial.subjects[name].folder / own).read_text(encoding="utf-8")
        for part in ("## Sizes", "## Data", "## Metrics", "## Command\n\n    femixer ", "## Use", "## Citation"):
            assert part in text, f"{name}: {part}"
