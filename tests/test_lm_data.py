"""Text data: what is read is all there is, and its tokens are made once."""

import errno
import os
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_text import documents_of, everything, texts, write_lines
from started import Started

from femixer.cli import main
from femixer.tasks.lm.data import building, corpus, sources
from femixer.tasks.lm.data.building import prepare
from femixer.tasks.lm.data.corpus import TRAIN, VALIDATION, open_corpus
from femixer.tasks.lm.data.shards import dtype_for, open_shards
from femixer.tasks.lm.data.tokenizer import load_tokenizer

# Corpora


@given(
    text=st.text(st.sampled_from("ab\n 自😀é"), min_size=100, max_size=300),
    part=st.integers(1, 100),
    piece=st.integers(5, 50),
)
@settings(max_examples=30)
def test_parts_of_a_text_file_are_the_whole_text(tmp_path_factory, text, part, piece):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE", piece)
        whole = open_corpus([path], part_bytes=part)
        held = {split: [*whole.documents(split)] for split in (TRAIN, VALIDATION)}
    assert "".join(one.text for split in held.values() for one in split) == text
    for pieces in held.values():
        assert [one.begins for one in pieces] == [True] + [False] * (len(pieces) - 1)
        assert [one.ends for one in pieces] == [False] * (len(pieces) - 1) + [True]


def test_single_text_file_holds_out_its_end_from_the_start_of_a_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {number}\n" for number in range(1000)))
    (held,) = open_corpus([path], validation_fraction=0.1).documents(VALIDATION)
    assert held.text.startswith("line ") and held.text.endswith("line 999\n")
    assert abs(len(held.text) / path.stat().st_size - 0.1) < 0.002


@pytest.mark.parametrize("part", [1, 50, 1000, None])
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz"])
def test_json_lines_are_all_read_once_in_order_however_they_are_cut(tmp_path, name, part):
    many = ["", "\ud800 half a pair", "two\nlines\u2028", *texts(31)]
    path = write_lines(tmp_path / name, [{"body": text} for text in many])
    read = [*open_corpus([path], [path], text_field="body", part_bytes=part).documents()]
    assert [one.text for one in read] == ["\ufffd half a pair", *many[2:]]  # the empty one is left out
    assert all(one.begins and one.ends for one in read)


@pytest.mark.parametrize("part", [1, 300, None])
def test_parquet_is_all_read_once_in_order_however_it_is_cut(tmp_path, part):
    write_parquet(tmp_path / "a.parquet", texts(31), row_group_size=7)
    whole = open_corpus([tmp_path / "a.parquet"], [tmp_path / "a.parquet"], part_bytes=part)
    assert [one.text for one in whole.documents()] == texts(31)
    assert part is None or len(whole.parts) > 3


def write_parquet(path, many, **options):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": many, "id": [*range(len(many))]}), path, **options)


def test_datasets_are_streamed_in_parts(tmp_path):
    for number in range(2):
        write_parquet(tmp_path / f"train-{number:05}-of-00002.parquet", texts(31, number), row_group_size=7)
    whole = open_corpus([f"datasets:{tmp_path}"], [f"datasets:{tmp_path}::train"])
    assert [one.text for one in whole.documents()] == texts(31, 0) + texts(31, 1)
    assert len(whole.parts) == 2 * 2 * 5
    with pytest.raises(ValueError, match=r"text_field='body' is not in datasets:.*choose one of text, id"):
        open_corpus([f"datasets:{tmp_path}"], text_field="body")


def test_datasets_are_asked_for_what_the_address_says(monkeypatch):
    import datasets

    asked = {}

    def load(name, config, **options):
        asked[name] = (config, options)
        return datasets.IterableDataset.from_generator(lambda: iter([{"text": text} for text in texts(5)]))

    monkeypatch.setattr(datasets, "load_dataset", load)
    whole = open_corpus(["datasets:HuggingFaceFW/fineweb-edu@v1:sample-10BT"], ["datasets:x::test"])
    assert [one.text for one in whole.documents()] == texts(5)
    assert asked == {
        "HuggingFaceFW/fineweb-edu": ("sample-10BT", {"split": "train", "revision": "v1", "streaming": True}),
        "x": (None, {"split": "test", "revision": None, "streaming": True}),
    }
    assert whole.name == "fineweb-edu-sample-10BT"


def test_folder_is_read_in_the_order_of_names_and_hidden_files_are_not(tmp_path):
    for name in ("b.txt", "a/z.md", "a/.git/x.txt", ".hidden.txt", "c.png", "a/empty.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if "empty" in name else name)
    write_lines(tmp_path / "c.jsonl", [{"text": "one"}, {"text": "two"}])
    whole = open_corpus([tmp_path], [tmp_path])
    assert [one.text for one in whole.documents()] == ["b.txt", "one", "two", "a/z.md"]


def test_default_is_the_standard_library_without_its_tests():
    whole = open_corpus()
    files = [one.path for part in whole.parts for one in part.slices]
    root = Path(sysconfig.get_path("stdlib"))
    assert {root / "argparse.py", root / "json" / "decoder.py"} <= {*files}
    assert all(path.suffix == ".py" for path in files)
    for folder in ("site-packages", "test", "tests", "__pycache__"):
        assert all(folder not in path.relative_to(root).parts for path in files)
    assert whole.parts == open_corpus().parts
    held = sum(split == VALIDATION for split, _ in whole.parts[0].documents())
    assert 0.01 < held / len(whole.parts[0].slices) < 0.12


def test_split_depends_on_the_text_alone(tmp_path):
    many = texts(499)
    one = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in many])
    reordered = write_lines(tmp_path / "b.jsonl", [{"text": text} for text in reversed(many + many[:50])])
    held = [
        {document.text for document in open_corpus([path], part_bytes=part).documents(VALIDATION)}
        for path, part in ((one, None), (one, 313), (reordered, 1000))
    ]
    assert held[0] == held[1] == held[2]
    assert 5 < len(held[0]) < 60
    assert held[0].isdisjoint(document.text for document in open_corpus([reordered]).documents(TRAIN))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"body": "x"}\n', r"text_field='text' is not in .*a\.jsonl, the line at byte 0, *; choose one of body"),
        (b'{"text": "x"}\n{"text": 7}\n', "text_field='text' holds 7 and not a text in .*byte 14"),
        (b'{"text": "x"}\n{"te\n', "the line at byte 14, is not JSON"),
        (b"[1]\n", "is not a JSON object"),
        (b"", "data='.*' is not allowed; choose a file that is not empty"),
    ],
)
def test_wrong_json_lines_are_named(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        [*open_corpus([path], part_bytes=3).documents()]


def test_missing_and_useless_sources_are_named(tmp_path):
    (tmp_path / "a.png").write_text("x")
    for wrong, message in {
        tmp_path / "none.txt": "is not there; choose a file, a folder, 'python'",
        tmp_path: "choose a folder with files",
        "datasets:a:b:c:d": "choose datasets:NAME",
    }.items():
        with pytest.raises(ValueError, match=message):
            open_corpus([wrong])
    with pytest.raises(ValueError, match=r"validation_fraction=1\.5 is not allowed"):
        open_corpus(validation_fraction=1.5)
    (tmp_path / "a.txt.zst").write_text("x")
    if sys.version_info < (3, 14):
        with pytest.raises(ValueError, match=r"needs Python 3\.14"):
            [*open_corpus([tmp_path / "a.txt.zst"], [tmp_path / "a.txt.zst"]).documents()]


# Shards


@pytest.mark.parametrize("part", [300, None])
def test_shards_hold_all_documents_their_bounds_and_bytes(tmp_path, lines, bytes_tokenizer, part):
    whole = open_corpus([lines], part_bytes=part)
    shards = prepare(whole, bytes_tokenizer, tmp_path / "shards", workers=1)
    for split in (shards.train, shards.validation):
        expected = [one.text for one in whole.documents(split.name)]
        assert documents_of(split, bytes_tokenizer) == expected
        assert split.documents == len(expected) > 0
        assert split.bytes == sum(len(text.encode()) for text in expected) == split.tokens - split.documents
    assert (shards.vocabulary, shards.start_token, shards.train.dtype) == (257, 256, np.uint16)


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_every_id_fits_the_type_of_the_shards(vocabulary, dtype):
    assert dtype_for(vocabulary) == dtype
    assert np.array([vocabulary - 1]).astype(dtype)[0] == vocabulary - 1


def test_any_stretch_of_the_stream_is_read_across_parts(tmp_path, lines, bytes_tokenizer):
    split = prepare(open_corpus([lines], part_bytes=100), bytes_tokenizer, tmp_path / "shards", workers=1).train
    assert len(split.places) > 20
    tokens, starts = everything(split)
    random = np.random.default_rng(0)
    for start, stop in np.sort(random.integers(0, split.tokens + 1, (101, 2)), axis=1).tolist():
        stretch, begins = split.read(start, stop)
        assert (stretch == tokens[start:stop]).all()
        assert (begins + start == starts[(starts >= start) & (starts < stop)]).all()


def test_long_document_continues_from_part_to_part(tmp_path, two_ends_folder):
    path = tmp_path / "a.txt"
    path.write_text("a b c\n" * 100)
    tokenizer = load_tokenizer(two_ends_folder)
    shards = prepare(open_corpus([path], part_bytes=37), tokenizer, tmp_path / "shards", workers=1)
    assert len(shards.train.places) > 10
    tokens, starts = everything(shards.train)
    assert starts.tolist() == [0]
    assert tokens.tolist() == [1, *[3, 4, 5] * (len(tokens) // 3), 2]


def test_parallel_work_gives_the_same_files(tmp_path, lines, bpe_folder):
    tokenizer = load_tokenizer(bpe_folder)
    whole = open_corpus([lines], part_bytes=1000)
    folders = [prepare(whole, tokenizer, tmp_path / str(count), workers=count).folder for count in (1, 2)]
    contents = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in folders
    ]
    assert len(contents[0]) > 15
    assert contents[0] == contents[1]
    assert documents_of(open_shards(folders[0]).train, tokenizer) == [one.text for one in whole.documents()]


def test_tokenizer_written_in_python_works_too(tmp_path, lines):
    from transformers import ByT5Tokenizer

    shards = prepare(open_corpus([lines]), ByT5Tokenizer(), tmp_path / "shards")
    first = next(open_corpus([lines]).documents())
    assert shards.train.read(0, 9)[0].tolist() == [1, *(byte + 3 for byte in first.text.encode()[:8])]


class Slow(corpus.Part):
    def documents(self):
        time.sleep(0.05)
        yield from super().documents()


def prepare_slowly(data, folder):
    """In this process and two others."""
    corpus.Part = Slow
    prepare(open_corpus([data], part_bytes=100), load_tokenizer("bytes"), folder, workers=2)


def test_kill_nine_then_again_does_only_what_was_missing(tmp_path, lines, bytes_tokenizer):
    folder = tmp_path / "shards"
    whole = open_corpus([lines], part_bytes=100)
    killed = Started(prepare_slowly, lines, folder)
    deadline = time.monotonic() + 200
    while len(finished := [*folder.glob("part-?????")]) < 3:
        assert killed.is_alive and time.monotonic() < deadline, killed.kill()
        time.sleep(0.01)
    killed.kill()
    time.sleep(0.5)  # the workers notice
    assert len(finished) < len(whole.parts)
    with pytest.raises(ValueError, match=r"is not complete .*stopped before its end"):
        open_shards(folder)

    written = {path: path.stat().st_mtime_ns for part in finished for path in part.iterdir()}
    made = []
    with pytest.MonkeyPatch.context() as patch:
        make = building.Tokenization.make
        patch.setattr(
            building.Tokenization, "make", lambda job, number, *rest: made.append(number) or make(job, number, *rest)
        )
        shards = prepare(whole, bytes_tokenizer, folder, workers=1)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert {int(path.name[5:]) for path in finished}.isdisjoint(made)
    assert not [*folder.glob("*.partial")]
    assert documents_of(shards.train, bytes_tokenizer) == [one.text for one in whole.documents()]


def test_a_text_is_known_by_its_contents_and_a_long_one_by_its_time(tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text("one two three")
    before = open_corpus([path]).identity
    os.utime(path, (1, 1))
    assert open_corpus([path]).identity == before
    path.write_text("one two threE")
    assert open_corpus([path]).identity != before
    monkeypatch.setattr("femixer.tasks.lm.data.corpus.LONG", 12)
    before = open_corpus([path]).identity
    os.utime(path, (2, 2))
    assert open_corpus([path]).identity != before


def test_changed_corpus_or_tokenizer_is_refused_and_made_anew_on_request(tmp_path, bytes_tokenizer, bpe_folder):
    path, folder = tmp_path / "a.txt", tmp_path / "shards"
    path.write_text("one\n" * 50)
    os.utime(path, ns=(0, 10**18))
    prepare(open_corpus([path]), bytes_tokenizer, folder)
    with pytest.raises(ValueError, match=r"holds the tokens of other data \(tokenizer was"):
        prepare(open_corpus([path]), load_tokenizer(bpe_folder), folder)
    with pytest.raises(ValueError, match=r"other data \(validation was 0\.05 and is now 0\.1"):
        prepare(open_corpus([path], validation_fraction=0.1), bytes_tokenizer, folder)
    path.write_text("two\n" * 50)
    os.utime(path, ns=(0, 10**18 + 1))  # same name, same size
    with pytest.raises(ValueError, match=r"other data \(data was"):
        prepare(open_corpus([path]), bytes_tokenizer, folder)
    shards = prepare(open_corpus([path]), bytes_tokenizer, folder, overwrite=True)
    assert documents_of(shards.validation, bytes_tokenizer)[0].startswith("two")


def test_folder_of_somebody_else_is_left_alone(tmp_path, lines, bytes_tokenizer):
    (tmp_path / "thesis.tex").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="choose a new or empty folder"):
            prepare(open_corpus([lines]), bytes_tokenizer, tmp_path, overwrite=overwrite)
    assert (tmp_path / "thesis.tex").exists()


def test_default_folder_is_another_one_for_other_data(tmp_path, monkeypatch, lines, bytes_tokenizer, bpe_folder):
    monkeypatch.chdir(tmp_path)
    bpe = load_tokenizer(bpe_folder)
    several = [prepare(open_corpus([lines]), tokenizer).folder for tokenizer in (bytes_tokenizer, bpe, bpe)]
    assert several[0] != several[1] == several[2]
    assert several[0].parent == Path("results/data") and several[0].name.startswith("lines-")


@pytest.mark.parametrize("moment", ["tokens", "starts", "part.json"])
def test_full_disk_is_reported_and_no_half_part_counts(tmp_path, lines, bytes_tokenizer, moment):
    whole, folder = open_corpus([lines], part_bytes=1000), tmp_path / "shards"
    full = OSError(errno.ENOSPC, "No space left on device")
    calls = iter(range(100))

    def failing(function):
        def call(*args, **options):
            if next(calls) == 2:
                raise full
            return function(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        if moment == "part.json":
            patch.setattr(building.atomic, "sync", failing(building.atomic.sync))
        else:
            name = "add" if moment == "tokens" else "counts"
            patch.setattr(building.Writer, name, failing(getattr(building.Writer, name)))
        with pytest.raises(OSError, match=r"no room for more tokens in .* parts are finished and kept"):
            prepare(whole, bytes_tokenizer, folder, workers=1)
    assert not [*folder.glob("*.partial")]
    shards = prepare(whole, bytes_tokenizer, folder, workers=1)
    assert documents_of(shards.train, bytes_tokenizer) == [one.text for one in whole.documents()]


def test_damaged_part_is_noticed_and_made_again(tmp_path, lines, bytes_tokenizer):
    whole, folder = open_corpus([lines], part_bytes=1000), tmp_path / "shards"
    expected = everything(prepare(whole, bytes_tokenizer, folder, workers=1).train)[0].copy()
    with (folder / "part-00002" / "train.tokens").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ValueError, match="part-00002 is damaged"):
        open_shards(folder)
    corpus_again = prepare(whole, bytes_tokenizer, folder, workers=1)
    assert (everything(corpus_again.train)[0] == expected).all()


def test_enough_tokens_end_the_reading_and_validation_is_there(tmp_path, lines, bytes_tokenizer):
    held = tmp_path / "held.txt"
    held.write_text("held out")
    whole = open_corpus([lines], [held], part_bytes=300)
    shards = prepare(whole, bytes_tokenizer, tmp_path / "shards", tokens=1000, workers=1)
    assert 1000 <= shards.train.tokens < 1500
    assert documents_of(shards.validation, bytes_tokenizer) == ["held out"]
    assert [one.text for one in whole.documents(TRAIN)] == texts(97)
    assert len([*shards.folder.glob("part-*")]) < len(whole.parts)


def test_text_that_leaves_a_split_empty_is_refused(tmp_path, bytes_tokenizer):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "one"}])
    with pytest.raises(ValueError, match=r"the validation split of data='a' is empty, with 1 documents in all"):
        prepare(open_corpus([path]), bytes_tokenizer, tmp_path / "shards")
    path = write_lines(tmp_path / "b.jsonl", [{"text": ""}])
    with pytest.raises(ValueError, match="data='b' is not allowed; choose sources with some text"):
        prepare(open_corpus([path]), bytes_tokenizer, tmp_path / "other")


# Commands


def test_commands_train_a_tokenizer_and_tokenize_with_it(tmp_path, capsys, lines):
    bpe, folder = tmp_path / "bpe", tmp_path / "shards"
    assert main(["lm", "tokenizer", "--data", str(lines), "--vocab-size", "300", "--out", str(bpe)]) == 0
    assert "300 tokens" in capsys.readouterr().out
    command = ["lm", "data", "--data", str(lines), "--tokenizer", str(bpe), "--shards", str(folder)]
    assert main(command) == 0
    captured = capsys.readouterr()
    shards = open_shards(folder)
    assert f"| train | {shards.train.tokens:,} | {shards.train.documents}" in captured.out
    assert "1/1 parts tokenized" in captured.err
    assert main(command) == 0 and capsys.readouterr().err == ""  # nothing left to do
    assert main(["lm", "data", "--shards", str(folder)]) == 0  # as it is, without its source
    assert main(["lm", "data", "--shards", str(folder), "--tokenizer", "bytes"]) == 2
    assert "tokenizer='bytes' is not allowed; choose the one of the tokens in" in capsys.readouterr().err
    assert main(["lm", "tokenizer", "--data", str(lines), "--out", str(bpe)]) == 2
    assert "choose a folder that does not exist yet" in capsys.readouterr().err


def test_tokenizer_is_trained_on_training_text_only(tmp_path, capsys):
    path = tmp_path / "a.txt"
    path.write_text("ab\n" * 950 + "xyzzy\n" * 25)
    assert main(["lm", "tokenizer", "--data", str(path), "--vocab-size", "400", "--out", str(tmp_path / "bpe")]) == 0
    assert "the text has no more to merge" in capsys.readouterr().out
    tokenizer = load_tokenizer(tmp_path / "bpe")
    assert len(tokenizer.encode("ab")) == 1 and len(tokenizer.encode("xyzzy")) == 5


def test_interrupted_default_corpus_goes_on_without_naming_it(tmp_path, monkeypatch, lines):
    monkeypatch.setattr(corpus, "standard_library", lambda: iter([lines]))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    folder = tmp_path / "shards"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building.Tokenization, "make", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(["lm", "data", "--shards", str(folder)]) == 130
    assert main(["lm", "data", "--shards", str(folder)]) == 0
    assert open_shards(folder).train.documents > 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--validation", "/nowhere/at/all.txt"], "validation='/nowhere/at/all.txt' is not there"),
        (
            ["--tokenizer", "./none"],
            "tokenizer='./none' is unknown (there is no such folder); choose 'bytes', a folder",
        ),
        (["--workers", "0"], "workers=0 is not allowed"),
        (["--overwrite"], "choose --shards too"),
        (["--shards", "a.txt"], "shards='a.txt' is not allowed; choose a folder"),
    ],
)
def test_wrong_options_are_errors_in_one_line(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a\nb\n" * 50)
    assert main(["lm", "data", "--data", "a.txt", *options]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and message in shown and len(shown.splitlines()) == 1


def test_part_sizes_follow_the_corpus(tmp_path):
    path = tmp_path / "big.txt"
    with path.open("wb") as file:  # sparse: little is read, it only looks large
        file.write(b"a" * corpus.HEAD)
        file.truncate(corpus.SMALLEST_PART * 5)
    assert len(open_corpus([path]).parts) == 6
