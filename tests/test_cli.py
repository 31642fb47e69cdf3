"""The command line around the commands: help, errors, signals."""

import ast
import importlib
import json
import shlex
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import started

from femixer import cli
from femixer.bench import BENCHES
from femixer.cli import main
from femixer.optional import MissingExtra, require
from femixer.tasks import TASKS, forecast, lm, mad, vision


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(capsys, args):
    assert main(args) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in {**TASKS, **cli.COMMANDS})


COMMANDS = {**TASKS, **cli.COMMANDS}
NESTED = {"bench": BENCHES, **{one.TASK.name: one.TASK.commands for one in (forecast, lm, mad, vision)}}
EVERY = [*([name] for name in COMMANDS), *([name, inner] for name, table in NESTED.items() for inner in table)]


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_every_listed_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        sys.exit(main([*command, "--help"]))
    assert stop.value.code == 0
    assert f"femixer {' '.join(command)}" in capsys.readouterr().out


def test_the_help_of_an_option_breaks_its_lines_between_sentences():
    """tyro keeps the line breaks of a field's docstring, so one within a sentence shows as a stray short line."""
    found = []
    for path in Path(cli.__file__).parent.rglob("*.py"):
        for kind in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(kind, ast.ClassDef) or "dataclass" not in " ".join(map(ast.unparse, kind.decorator_list)):
                continue
            for field, text in pairwise(kind.body):
                if isinstance(field, ast.AnnAssign) and field.value and isinstance(text, ast.Expr):
                    *broken, _ = ast.literal_eval(text.value).splitlines()
                    found += [line for line in broken if not line.endswith((".", ":", ";"))]
    assert not found


def test_the_help_of_a_command_explains_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["argmax", "--help"])
    shown = capsys.readouterr().out
    options = "paper length channels heads margin noise lr batch steps seed out resume overwrite threads"
    for option in options.split(" "):
        assert f"--{option}" in shown
    assert "Positions T of a sequence" in shown


def test_an_unknown_command_names_the_known_ones(capsys):
    assert main(["argmin"]) == 2
    assert capsys.readouterr().err.startswith("error: command='argmin' is unknown; choose one of argmax")


def test_an_unknown_option_is_an_error(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["argmax", "--stepz", "3"])
    assert stop.value.code == 2
    assert "--stepz" in capsys.readouterr().err


def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(capsys, monkeypatch):
    import_module = importlib.import_module

    def without_tyro(name, *args):
        if name == "tyro":
            raise ModuleNotFoundError("No module named 'tyro'", name="tyro")
        return import_module(name, *args)

    monkeypatch.setattr("importlib.import_module", without_tyro)
    assert main(["argmax"]) == 2
    assert capsys.readouterr().err == (
        'error: tyro is needed here and is not installed; install it with: pip install "femixer[cli]"\n'
    )


def test_a_broken_package_is_not_reported_as_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import a_package_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_it_needs") as error:
        require("broken_package", "cli")
    assert not isinstance(error.value, MissingExtra)
    with pytest.raises(MissingExtra, match=r'pip install "femixer\[plot\]"'):
        require("an_absent_package.module", "plot")


def test_python_m_femixer_is_the_command():
    done = started.python("-m", "femixer", "--version", timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("femixer ")


def test_a_command_that_imports_transformers_says_only_what_it_has_to_say():
    done = started.python("-m", "femixer", "lm", "presets")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("| preset |")


def test_workers_of_a_command_that_import_transformers_say_nothing_either(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from femixer.training.distributed import carried_out\n"
        "if __name__ == '__main__':\n"
        "    [finished] = [future for _, future in carried_out(__import__, ['torchao'], 1)]\n"
        "    assert 'pickle' in str(finished.exception())  # it was imported: a module cannot come back\n"
    )
    done = started.python(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


OPTIONS = shlex.split(
    "--length 13 --channels 15 --heads 3 --batch 7 --validation 11 --steps 120 --evaluate-every 20 --threads 1"
)


def records(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": 0} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert main(["argmax", *OPTIONS, "--out", str(folder)]) == 0
    return records(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_command_ends_like_an_uninterrupted_one_when_resumed(tmp_path, capsys, uninterrupted, number):
    command = ["argmax", *OPTIONS, "--out", str(tmp_path / "run")]
    process = started.command(*command, "--overwrite")
    while not [*(tmp_path / "run").glob("checkpoints/step-*[0-9]")]:
        assert process.is_alive, process.end()
        time.sleep(0.002)
    process.send(number)
    ended = process.end(60)
    assert not (tmp_path / "run" / "table.md").exists()
    if number == signal.SIGKILL:
        assert ended.code == -signal.SIGKILL
    else:
        assert ended.code == 130
        last = ended.err.splitlines()[-1]
        assert last.startswith("stopped after step ")
        assert last.endswith(f"continue with: {shlex.join(['femixer', *command, '--resume'])}")
    assert main([*command, "--resume"]) == 0
    assert "step 0/" not in capsys.readouterr().err  # it did continue
    assert records(tmp_path / "run") == uninterrupted


def test_ctrl_c_before_training_is_quiet(capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("femixer.tasks.argmax.main", interrupted)
    assert main(["argmax"]) == 130
    assert capsys.readouterr() == ("", "")
