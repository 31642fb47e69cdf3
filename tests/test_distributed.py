"""Two processes compute what one computes, sharded or not, and each reads the other's checkpoints.

The scenarios run in processes that are forked from one that has imported everything and are connected through gloo. The
tests look at what they left in a folder.
"""

import io
import json
import os
import resource
import signal
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from started import Started, places
from torch import Tensor, nn
from torch.nn import functional

from femixer.cli import main
from femixer.training import (
    EngineOptions,
    Fit,
    Part,
    Results,
    RunOptions,
    TrainOptions,
    adamw,
    checkpoint,
    cosine,
    distributed,
    full_weights,
    generator,
    train,
)

STEPS, ROWS, LENGTH, WORDS, WIDTH = 7, 12, 5, 13, 6


@dataclass(frozen=True)
class Nothing:
    """Options of an experiment that has none."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))  # fewer rows than processes

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.mix(self.norm(x)).cumsum(1).tanh()


class Language(nn.Module):
    """Two blocks between a table of words and the same table."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator(0, name))
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, part: Part) -> tuple[Tensor, Tensor]:
    """Words and labels. Row i has i + 1 labels of 12, so that the parts score very different numbers of words."""
    words = torch.randint(WORDS, (ROWS, LENGTH), generator=generator(0, "words", step))
    labels = words.roll(-1, 1)
    scored = torch.arange(LENGTH) * 2 < torch.arange(ROWS)[:, None]  # none in the first row
    labels = labels.masked_fill(~scored, -100)
    return words[part.rows(ROWS)], labels[part.rows(ROWS)]


def losses(model: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    words, labels = data
    logits = model(words)
    logits = getattr(logits, "logits", logits).float()
    return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")}


def evaluate(model: nn.Module) -> list[dict[str, Any]]:
    """Each process scores its own part of the rows."""
    words, labels = batch(0, distributed.part())
    error, count = distributed.total(losses(model, (words, labels))["loss"].item(), int((labels >= 0).sum()))
    return [{"split": "validation", "loss": error / count}]


def transformer() -> nn.Module:
    """FEM as language models have it, with transformers' wrapping."""
    from femixer.models import FEMConfig, FEMForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 12, "intermediate_size": 17, "num_hidden_layers": 2, "num_attention_heads": 3}
    return FEMForCausalLM(FEMConfig(vocab_size=WORDS, prior=["softmax", "gla"], tie_word_embeddings=True, **shape))


def learn(
    folder: Path,
    each_batch: Callable[[int], None] = lambda step: None,
    build: Callable[[], nn.Module] = Language,
    lr: float = 0.1,
    **engine: Any,
) -> dict[str, Tensor]:
    """Train in `folder`, or go on there, and return the weights (in the main process)."""

    def watched(step: int, part: Part) -> tuple[Tensor, Tensor]:
        each_batch(step)
        return batch(step, part)

    run = RunOptions(folder, resume=folder.exists(), threads=1)
    run.apply()
    model = build()
    fit = Fit(
        model=model,
        optimizer=lambda model: adamw(model, lr, betas=(0.9, 0.95)),
        batch=watched,
        losses=losses,
        items=lambda data: int((data[1] >= 0).sum()),
        evaluate=evaluate,
    )
    options = TrainOptions(
        steps=STEPS,
        evaluate_every=3,
        seed=0,
        schedule=cosine(STEPS, 2, 0.1),
        clip=0.5,
        log_every=1,
        engine=EngineOptions(**engine),
    )
    train(fit, options, Results("language", Nothing(), run))
    return full_weights(model)


def stop_at(step: int, rank: int) -> Callable[[int], None]:
    def each_batch(now: int) -> None:
        if now == step and distributed.rank() == rank:
            signal.raise_signal(signal.SIGTERM)

    return each_batch


def fork(processes: int, action: Callable[[], Any], folder: Path) -> None:
    """Run `action` in so many processes, each of which leaves what it returned, or the error, in `folder`/rank."""
    children = []
    for rank, place in enumerate(places(processes)):
        if child := os.fork():
            children.append(child)
            continue
        if processes > 1:
            os.environ.update(place)
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                try:
                    outcome = {"returned": action()}
                except (Exception, KeyboardInterrupt) as error:
                    outcome = {"error": f"{type(error).__name__}: {error}"}
                    if os.environ.get("SHOW"):
                        traceback.print_exc()
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            folder.mkdir(parents=True, exist_ok=True)
            outcome["warnings"] = [str(warning.message) for warning in seen]
            torch.save(outcome, folder / f"{rank}.pt")
            distributed.stop()
        finally:
            os._exit(0)
    for child in children:
        os.waitpid(child, 0)


def scenarios(folder: Path) -> None:
    torch.set_num_threads(1)

    def run(name: str, processes: int, where: str | None = None, **options: Any) -> None:
        fork(processes, lambda: learn(folder / (where or name), **options), folder / "outcomes" / name)

    run("one", 1)
    run("accumulated", 1, accumulate=4)
    run("ddp", 2, accumulate=2)
    run("sharded", 2, accumulate=2, shard="full")
    run("bf16", 2, shard="full", precision="bf16")
    run("bf16 alone", 1, precision="bf16")
    run("transformer", 1, build=transformer, lr=0.01)
    run("sharded transformer", 2, build=transformer, lr=0.01, shard="full", checkpointing=True)
    run("stopped ddp", 2, "from two", each_batch=stop_at(4, rank=1))
    run("stopped sharded", 2, "from shards", each_batch=stop_at(4, rank=1), shard="full")
    run("stopped one", 1, "to shards", each_batch=stop_at(4, rank=0))
    for kind in ("from shards", "to shards"):  # stopped at the same step, sharded and not
        fork(1, lambda kind=kind: newest_weights(folder / kind), folder / "outcomes" / f"weights {kind}")  # type: ignore[misc]
    run("from two", 1)
    run("from shards", 1)
    run("to shards", 2, shard="full")
    run("full", 2, each_batch=full_disk_at(5), shard="full")
    damage = folder / "full" / "checkpoints" / "step-00000003" / "__1_0.distcp"
    content = bytearray(damage.read_bytes())
    content[-9] ^= 0xFF
    damage.write_bytes(content)
    run("damaged", 2, "full", shard="full")
    (folder / "full").rename(folder / "damaged")
    for processes in (1, 2):
        out = folder / f"argmax-{processes}"
        fork(processes, lambda out=out: command(out), folder / "outcomes" / f"command {processes}")  # type: ignore[misc]
    fork(2, lambda: open_anew(folder / "one"), folder / "outcomes" / "refused")


def open_anew(folder: Path) -> None:
    run = RunOptions(folder)
    run.apply()
    Results("language", Nothing(), run)


def command(folder: Path) -> str:
    """What `femixer argmax` prints."""
    small = "--length 13 --channels 15 --heads 3 --batch 7 --validation 11 --steps 3 --evaluate-every 2 --device cpu"
    with redirect_stdout(io.StringIO()) as said:
        assert main(["argmax", *small.split(), "--out", str(folder)]) == 0
    return said.getvalue()


def newest_weights(folder: Path) -> dict[str, Tensor]:
    return checkpoint.weights(checkpoint.stored(folder / "checkpoints")[0])


def full_disk_at(step: int) -> Callable[[int], None]:
    """From this step on, files of more than a few bytes cannot be written by the second process."""

    def each_batch(now: int) -> None:
        if now == step and distributed.rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))

    return each_batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    ended = Started(scenarios, folder).end()
    assert ended.code == 0, ended.err
    return folder


def outcomes(folder: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(file) for file in sorted((folder / "outcomes" / name).iterdir())]


def records(folder: Path, name: str) -> dict[tuple[str, int], dict[str, float]]:
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return {(record["split"], record["step"]): record for record in map(json.loads, lines)}


def assert_same_run(folder: Path, name: str, tolerance: float = 1e-5, as_in: str = "one") -> None:
    """Every loss and gradient norm of the run, and the weights that it ended with, are those of one process."""
    expected, got = records(folder, as_in), records(folder, name)
    assert [*got] == [*expected]
    for at, record in expected.items():
        for key in {"loss", "grad_norm", "lr"} & {*record}:
            assert got[at][key] == pytest.approx(record[key], rel=tolerance), f"{key} at {at}"
    (one, *_), (main, *others) = outcomes(folder, as_in), outcomes(folder, name)
    assert [*main["returned"]] == [*one["returned"]]
    for key, weights in one["returned"].items():
        torch.testing.assert_close(main["returned"][key], weights, rtol=10 * tolerance, atol=10 * tolerance)
    assert all(other["returned"] == {} for other in others)


def test_the_recorded_loss_is_the_mean_over_the_scored_words_of_the_global_batch(folder):
    words, labels = batch(1, Part())
    logits = Language()(words)
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert records(folder, "one")["train", 1]["loss"] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["accumulated", "ddp", "sharded"])
def test_however_a_batch_is_divided_the_run_is_the_same(folder, name):
    assert_same_run(folder, name)


def test_a_sharded_and_checkpointed_transformer_with_tied_weights_is_trained_as_in_one_process(folder):
    assert_same_run(folder, "sharded transformer", as_in="transformer")
    assert "lm_head.weight" in outcomes(folder, "sharded transformer")[0]["returned"]


@pytest.mark.parametrize("name", ["bf16", "bf16 alone"])
def test_bfloat16_stays_near_float32_and_is_not_it(folder, name):
    assert_same_run(folder, name, 1e-2)
    with pytest.raises(AssertionError):
        assert_same_run(folder, name)


@pytest.mark.parametrize("name", ["stopped ddp", "stopped sharded"])
def test_a_signal_to_one_process_stops_all_after_the_same_step(folder, name):
    assert [outcome["error"] for outcome in outcomes(folder, name)] == [
        "Interrupted: stopped after step 4 of 7, which is saved"
    ] * 2


@pytest.mark.parametrize("name", ["from two", "from shards", "to shards"])
def test_a_checkpoint_continues_in_another_number_of_processes(folder, name):
    assert_same_run(folder, name)
    assert not outcomes(folder, name)[0]["warnings"]


def test_plain_weights_are_read_from_a_sharded_checkpoint(folder):
    sharded, plain = (outcomes(folder, f"weights {kind}")[0]["returned"] for kind in ("from shards", "to shards"))
    assert {*sharded} == {*plain} == {*Language().state_dict()} - {"head.weight"}
    for name, value in plain.items():
        torch.testing.assert_close(sharded[name], value, rtol=1e-4, atol=1e-5)


def test_a_disk_that_is_full_for_one_process_fails_in_all_and_spares_the_checkpoint_before(folder):
    for outcome in outcomes(folder, "full"):
        assert outcome["error"].startswith("OSError: checkpoint ")
        assert "step-00000006 could not be saved ([Errno 27]" in outcome["error"]
        assert "those before it are intact" in outcome["error"]


def test_a_damaged_shard_is_noticed_by_all_and_told_by_one(folder):
    assert_same_run(folder, "damaged")
    told, silent = (outcome["warnings"] for outcome in outcomes(folder, "damaged"))
    assert len(told) == 1 and "step-00000003 is damaged (__1_0.distcp has changed)" in told[0]
    assert silent == []


def test_a_folder_that_may_not_be_used_is_an_error_in_every_process(folder):
    errors = [outcome["error"] for outcome in outcomes(folder, "refused")]
    assert len(errors) == 2 and all("holds an unfinished run" in error for error in errors)


def test_a_command_gives_the_result_of_one_process_and_one_process_speaks(folder):
    (alone,), (speaker, silent) = (outcomes(folder, f"command {number}") for number in (1, 2))
    assert speaker["returned"] == alone["returned"].replace("argmax-1", "argmax-2")
    assert "softmax attention" in speaker["returned"] and silent["returned"] == ""
