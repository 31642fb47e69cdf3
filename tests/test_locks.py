"""One process at a time works in a results folder."""

import errno
import time
from pathlib import Path

import pytest
from started import Started
from tiny_run import Tiny, tiny_run

from femixer.training import Results, RunOptions, results


def begin(folder: Path) -> None:
    results = Results("tiny", Tiny(), RunOptions(folder))
    folder.with_name("begun").touch()
    time.sleep(600)
    results.finish("never")


def worker(folder: Path) -> Started:
    """A process that has begun a run in the folder."""
    process = Started(begin, folder)
    while not folder.with_name("begun").exists():
        assert process.is_alive, process.end()
        time.sleep(0.01)
    return process


def test_a_folder_in_use_is_refused_with_who_holds_it_and_taken_over_when_that_dies(tmp_path):
    folder = tmp_path / "run"
    other = worker(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(ValueError, match=rf"is in use by process {other.pid} on .* \(since .*\); wait for it"):
            tiny_run(folder, **options)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    other.kill()
    records, _ = tiny_run(folder, resume=True)
    assert records == tiny_run(tmp_path / "alone")[0]


def test_a_finished_run_leaves_no_lock(tmp_path):
    results = Results("tiny", Tiny(), RunOptions(tmp_path / "run"))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.json", "lock", "lock.json"}
    results.finish("| a |\n")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.json", "table.md"}


def test_the_same_process_may_go_on_in_its_folder(tmp_path):
    results.hold(tmp_path)
    results.hold(tmp_path)
    results.release(tmp_path)
    assert not [*tmp_path.iterdir()]
    results.release(tmp_path)


def test_a_disk_without_locks_is_said_and_used(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(results.FileLock, "acquire", refuse)
    with pytest.warns(UserWarning, match="on a disk without locks"):
        results.hold(tmp_path)
    results.release(tmp_path)
