"""Large inputs through the real commands: time, peak memory and what they say meanwhile.

    python benchmarks/limits.py text          # a corpus of 1 GB: lm data, lm train, generate, eval
    python benchmarks/limits.py prompt        # prompts of 1, 10 and 100 MB: generate, with a state that does not grow
    python benchmarks/limits.py csv           # 5 million rows of 7 channels: forecast train, forecast predict
    python benchmarks/limits.py pictures      # 200,000 PNG files: vision train, vision eval
    python benchmarks/limits.py vocabulary    # 256,000 tokens: lm data, lm train, generate, eval, inspect
    python benchmarks/limits.py csv --scale 0.01

The data are made in a temporary folder (--folder chooses where) and removed at the end. Memory is the peak of resident
memory of the largest process of a command, which for tokens and data sets includes what is mapped from files; CPU
seconds are those of all its processes, and depend less on what else the machine does. Lines: on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

SIZES = {"text": 10**9, "prompt": 10**8, "csv": 5 * 10**6, "pictures": 200_000, "vocabulary": 256_000}
TRAINING = (
    "--prior gla --hidden-size 64 --layers 2 --heads 4 --context 256 --batch-tokens 1024 --steps 10 --warmup-steps 0 "
    "--evaluate-every 5 --validation-tokens 4096 --sample-tokens 0"
)
TASK = """task: limits
dataset_path: json
dataset_kwargs:
  data_files:
    test: documents.jsonl
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: text
metric_list:
  - metric: bits_per_byte
    aggregation: bits_per_byte
    higher_is_better: false
metadata:
  version: 1.0
"""


class Measured(NamedTuple):
    command: str
    seconds: float
    cpu: float
    gigabytes: float
    lines: int


def measured(folder: Path, command: str, *more: str) -> Measured:
    """Run `femixer command`, words apart, and then `more` in the folder; an error if it fails."""
    arguments = [*command.split(), *more]
    # The packages of eval keep what they read in the folder too, and do not ask the network.
    places = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    began = time.perf_counter()
    with (folder / "said.txt").open("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "femixer", *arguments], cwd=folder, stderr=said, env=os.environ | places
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        said.seek(0)
        lines = said.read().splitlines()
    if process.returncode:
        raise SystemExit(f"femixer {' '.join(arguments)} ended with {process.returncode}: {lines[-3:]}")
    done = Measured(
        " ".join(arguments), seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e9, len(lines)
    )
    print(
        f"{done.seconds:.1f} s, {done.cpu:.1f} s of CPU, {done.gigabytes:.2f} GB: {done.command}",
        file=sys.stderr,
        flush=True,
    )
    return done


def words(count: int, seed: int = 0) -> np.ndarray:
    """[count, 9] in uint8: words of 3 to 8 letters with a space behind them, filled up with zeros."""
    rng = np.random.default_rng(seed)
    letters = rng.integers(97, 123, (count, 9), dtype=np.uint8)
    lengths = rng.integers(3, 9, (count, 1))
    place = np.arange(9)
    return np.where(place < lengths, letters, np.where(place == lengths, 32, 0)).astype(np.uint8)


def text(size: int, vocabulary: np.ndarray, seed: int = 1) -> Iterator[bytes]:
    """About `size` bytes: words in lines of 16, the frequent ones much more frequent than the rare ones."""
    rng = np.random.default_rng(seed)
    while size > 0:
        share = rng.random(16 * min(131_072, 1 + size // 100)) ** 3
        rows = vocabulary[(share * len(vocabulary)).astype(int)].reshape(-1, 16 * 9)
        rows = np.concatenate([rows, np.full((len(rows), 1), 10, np.uint8)], 1).reshape(-1)
        piece = rows[rows > 0].tobytes()
        yield piece[:size]
        size -= len(piece)


def write_text(path: Path, size: int, vocabulary: np.ndarray) -> None:
    with path.open("wb") as file:
        file.writelines(text(size, vocabulary))


def write_documents(folder: Path, size: int, vocabulary: np.ndarray) -> None:
    """A task of lm-evaluation-harness over texts of about 1,000 bytes."""
    (folder / "limits.yaml").write_text(TASK)
    with (folder / "documents.jsonl").open("w") as file:
        for piece in text(size, vocabulary, seed=2):
            lines = piece.decode().splitlines()
            for start in range(0, len(lines), 10):
                file.write(json.dumps({"text": " ".join(lines[start : start + 10])}) + "\n")


def of_text(folder: Path, size: int) -> Iterator[Measured]:
    vocabulary = words(50_000)
    write_text(folder / "corpus.txt", size, vocabulary)
    yield measured(folder, "lm data --data corpus.txt --shards shards")
    yield measured(folder, f"lm train --shards shards --out run {TRAINING}")
    write_text(folder / "prompt.txt", size // 1000, vocabulary)
    yield measured(folder, "generate run --prompt-file prompt.txt --max-tokens 20")
    write_documents(folder, size, vocabulary)
    yield measured(folder, "eval run --tasks limits --include-path . --limit 100 --out eval")


def of_prompt(folder: Path, size: int) -> Iterator[Measured]:
    """One layer, so that reading the prompt and not the model is what is measured; three sizes, to see what grows."""
    vocabulary = words(50_000)
    write_text(folder / "corpus.txt", max(size // 100, 10**6), vocabulary)
    measured(folder, "lm tokenizer --data corpus.txt --vocab-size 4096 --out tokenizer")
    sizes = "--prior decay --hidden-size 16 --layers 1 --heads 2 --context 256 --batch-tokens 1024"
    short = "--steps 10 --warmup-steps 0 --evaluate-every 10 --validation-tokens 4096 --sample-tokens 0"
    measured(folder, f"lm train --data corpus.txt --tokenizer ./tokenizer --out run {sizes} {short}")
    for share in (100, 10, 1):
        write_text(folder / "prompt.txt", size // share, vocabulary)
        done = measured(folder, "generate run --prompt-file prompt.txt --max-tokens 20")
        yield done._replace(command=f"{done.command} ({size // share:,} bytes)")


def of_csv(folder: Path, rows: int) -> Iterator[Measured]:
    import pyarrow
    from pyarrow import csv

    rng = np.random.default_rng(0)
    minutes = np.arange(rows)
    dates = np.datetime64("2010-01-01T00:00", "s") + minutes.astype("timedelta64[m]")
    table = {"date": pyarrow.array(dates)}
    for channel in range(7):
        wave = np.sin(minutes / (200 + 100 * channel)) + 0.1 * rng.standard_normal(rows)
        table[f"channel{channel}"] = pyarrow.array(np.round(wave, 3))
    csv.write_csv(pyarrow.table(table), folder / "series.csv")
    sizes = "--lookback 96 --horizon 24 --batch 4096"
    yield measured(folder, f"forecast train --data series.csv --model LastValue {sizes} --out run")
    yield measured(folder, "forecast predict --data series.csv --model run --out next")


def of_pictures(folder: Path, count: int) -> Iterator[Measured]:
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(count):
        place = folder / "pictures" / f"class{number % 10}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(place / f"{number:06}.png")
    model = "--preset digits --width 16 --layers 1 --heads 2 --batch 1024 --epochs 1 --warmup-epochs 0 --ema 0"
    yield measured(folder, f"vision train --data pictures {model} --out run")
    yield measured(folder, "vision eval --data pictures --model run --split all --out eval")


def of_vocabulary(folder: Path, size: int) -> Iterator[Measured]:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    end, unknown = "<|endoftext|>", "<unk>"
    spelled = [bytes(row[row > 32]).decode() for row in words(2 * size)]
    kept = [*dict.fromkeys(spelled)][: size - 2]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*kept, end, unknown])}, unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=end, unk_token=unknown)
    fast.save_pretrained(folder / "tokenizer")
    vocabulary = words(2 * size)
    write_text(folder / "corpus.txt", 80 * size, vocabulary)
    yield measured(folder, "lm data --data corpus.txt --tokenizer ./tokenizer --shards shards")
    yield measured(folder, f"lm train --shards shards --out run {TRAINING}")
    yield measured(folder, "generate run --max-tokens 100 --prompt", "one two three")
    write_documents(folder, 4000 * 100, vocabulary)
    yield measured(folder, "eval run --tasks limits --include-path . --limit 100 --out eval")
    yield measured(folder, "inspect run --out inspect --text", "one two three")


SUBJECTS: dict[str, Callable[[Path, int], Iterator[Measured]]] = {
    "text": of_text,
    "prompt": of_prompt,
    "csv": of_csv,
    "pictures": of_pictures,
    "vocabulary": of_vocabulary,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full size")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    options = parser.parse_args()
    size = int(SIZES[options.subject] * options.scale)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="limits-") as folder:
        rows = [*SUBJECTS[options.subject](Path(folder), size)]
    print("| `femixer` | seconds | CPU seconds | GB | lines |\n|---|---:|---:|---:|---:|")
    for row in rows:
        print(f"| {row.command} | {row.seconds:.0f} | {row.cpu:.0f} | {row.gigabytes:.2f} | {row.lines} |")


if __name__ == "__main__":
    main()
