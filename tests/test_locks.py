"""One process at a time works in a results folder."""

import errno
import time
from pathlib import Path

import pytest
from started import Started, torchrun
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


FAILING = """
import sys
from dataclasses import dataclass
from pathlib import Path

from femixer.training import distributed
from femixer.training.jobs import Job, JobEngine, Jobs, run
from femixer.training.store import Kind


@dataclass(frozen=True)
class Shared(Job):
    number: int
    title = "shared"

    def summary(self, record):
        return "done"

    def carry_out(self, options):
        if distributed.rank() == 1 and self.number == 0:
            raise MemoryError("on one process alone")
        distributed.total(1.0)
        return {"seconds": 1.0}


distributed.start("cpu")
run([Shared(0), Shared(1)], Kind("shared", 1), Jobs(Path(sys.argv[1]), JobEngine(jobs=1)), False)
"""


def test_processes_that_share_a_job_do_not_wait_for_one_that_failed(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    ended = torchrun(2, tmp_path / "failing.py", tmp_path / "store")
    assert ended.returncode != 0 and "on one process alone" in ended.stderr
    assert not [*(tmp_path / "store").glob("jobs/*.json")]
