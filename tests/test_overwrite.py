"""--overwrite: what is there stays whole and usable until the new results are complete, wherever a process dies."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from lm_text import texts
from tiny_run import Crash, Tiny, crash_at, in_child, kill_at, same, tiny_run

from femixer.tasks.lm.data import building
from femixer.tasks.lm.data.corpus import open_corpus
from femixer.training import atomic
from femixer.training.results import model_folder

OLD, NEW = Tiny(seed=1, steps=2), Tiny(seed=2, steps=2)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def seeds_of(folder: Path) -> set[int]:
    """What each file of a run says whose it is."""
    config = json.loads((folder / "config.json").read_text())["experiment"]["seed"]
    return {config, int((folder / "table.md").read_text().split()[-1]), seed_of_model(folder)}


def seed_of_model(folder: Path) -> int:
    return json.loads((model_folder(folder) / "config.json").read_text())["seed"]


def test_the_old_run_stays_until_the_new_one_is_complete_and_what_is_not_ours_stays_anyway(tmp_path, capsys):
    out = tmp_path / "out"
    tiny_run(out, OLD, finish=True)
    (out / "notes.txt").write_text("mine")
    before = content(out)
    for again in range(2):  # --overwrite starts the new one anew, too
        with pytest.raises(Crash):
            tiny_run(out, NEW, each_batch=crash_at(2), finish=True, overwrite=True)
        assert f"{out}/ keeps its run until the new one, in {out}/replacement/, is complete" in capsys.readouterr().err
        after = content(out)
        assert {name: after.get(name) for name in before} == before, again
    with pytest.raises(
        ValueError, match=r"holds a run and in replacement/ an unfinished one .*--resume continues that"
    ):
        tiny_run(out, NEW)
    with pytest.raises(
        ValueError, match=r"out='.*replacement'.*seed was 2 and is now 1; without .*replacement/ the older"
    ):
        tiny_run(out, OLD, resume=True)
    found = tiny_run(out, NEW, resume=True, finish=True)
    assert same(found, tiny_run(tmp_path / "alone", NEW, finish=True))
    after, alone = content(out), content(tmp_path / "alone")
    assert after.keys() == {*alone, "notes.txt"}
    assert seeds_of(out) == {2}


def test_an_overwriting_run_may_be_killed_at_any_touch_of_the_disk(tmp_path, monkeypatch):
    """Then one of the two runs is whole, its model can be loaded, and --resume leads to the new one."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # which a process that dies takes nothing away from
    expected = tiny_run(tmp_path / "alone", NEW, finish=True, keep=0)
    whole = content(tmp_path / "alone").keys()
    tiny_run(tmp_path / "old", OLD, finish=True)
    moment, found = 0, set()
    while True:
        moment += 1
        out = tmp_path / f"killed-{moment}"
        subprocess.run(["cp", "-r", tmp_path / "old", out], check=True)

        def killed(out: Path = out, moment: int = moment) -> None:
            kill_at(moment)
            tiny_run(out, NEW, finish=True, overwrite=True, keep=0)

        status = in_child(killed)
        if status == 0:
            break
        assert os.WIFSIGNALED(status), f"the run that should die at moment {moment} failed instead"
        found.add(seed_of_model(out))
        begun = (out / "replacement" / "config.json").exists() or seed_of_model(out) == 2
        if not begun:
            assert content(tmp_path / "old").items() <= content(out).items()
        again = {"resume": True} if begun else {"overwrite": True}
        assert same(tiny_run(out, NEW, finish=True, keep=0, **again), expected)
        assert seeds_of(out) == {2} and content(out).keys() - {"lock", "lock.json"} == whole, moment
    assert moment > 20 and found == {1, 2}


def test_tokens_are_replaced_when_the_new_ones_are_complete(tmp_path, bytes_tokenizer, monkeypatch):
    for name, seed in (("old", 0), ("new", 1)):
        (tmp_path / f"{name}.txt").write_text("".join(texts(97, seed)))
    folder = tmp_path / "shards"

    def prepared(name, **options):
        corpus = open_corpus([tmp_path / f"{name}.txt"], part_bytes=500)
        return building.prepare(corpus, bytes_tokenizer, folder, workers=1, **options)

    prepared("old")
    before, original, made = content(folder), building.Tokenization.make, []

    def failing(job, number, part):
        if len(made) == 2:
            raise Crash
        made.append(number)
        return original(job, number, part)

    with monkeypatch.context() as patch:
        patch.setattr(building.Tokenization, "make", failing)
        with pytest.raises(Crash):
            prepared("new", overwrite=True)
    after = content(folder)
    assert {name: after.get(name) for name in before} == before
    assert prepared("old").fingerprint == json.loads(before["index.json"])["fingerprint"]
    first = {path: path.stat().st_mtime_ns for path in (folder / atomic.NEW).glob("part*/*")}
    shards = prepared("new", overwrite=True)
    assert shards.fingerprint == prepared("new").fingerprint != json.loads(before["index.json"])["fingerprint"]
    assert first and not (folder / atomic.NEW).exists()
    kept = {folder / path.relative_to(folder / atomic.NEW): when for path, when in first.items()}
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # what was made before the crash is not made again
