"""No damaged folder and no impossible option ends in a traceback, or in a result that is not one: see fuzz.py."""

from pathlib import Path

import pytest
from fuzz import Case, Trial, cases, make, started

COUNT, SEED = 300, 20
# Mostly a command that starts quickly.
STARTED_OF = {"evaluated": 17, "language": 2, "upgraded": 1}
STARTED = sum(STARTED_OF.values())


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    place = tmp_path_factory.mktemp("fuzz")
    return Trial(make(place), place / "trial")


def test_damaged_folders_and_impossible_options_are_one_line_or_change_nothing(trial: Trial) -> None:
    problems = [f"{case.subject}: {case.told}\n{problem}" for case in cases(trial.subjects, COUNT - STARTED, SEED)
                if (problem := trial.run(case)) is not None]  # fmt: skip
    assert not problems, "\n".join(problems)


def test_so_are_they_where_the_command_is_started(trial: Trial) -> None:
    of = (case for name, n in STARTED_OF.items() for case in cases({name: trial.subjects[name]}, n, SEED + 1))
    tried = ((case, trial.run(case, started)) for case in of)
    problems = [f"{case.subject}: {case.told}\n{problem}" for case, problem in tried if problem is not None]
    assert not problems, "\n".join(problems)


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
