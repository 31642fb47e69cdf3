"""`femixer mad study`: who starts which weights of MAD's models, what a variant changes, and when a task is learned."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from femixer.cli import main
from femixer.mixer import FreeEnergyMixer
from femixer.models.named import fem
from femixer.tasks.mad import STUDY
from femixer.tasks.mad.model import build
from femixer.tasks.mad.study import VARIANTS, Variant, average, begin, columns, learned, optimizer_of, tabulate

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 13}


def model_of(parts: str = "CLTG", prior: str = "softmax", gates: str = "own", **fields: Any) -> Any:
    return build("recall", {**SIZES, **fem(prior, parts), **fields}, 0, gates)


def mixer_of(model: Any) -> FreeEnergyMixer:
    return model.model.layers[0].mixer


def maps(mixer: FreeEnergyMixer) -> dict[str, Tensor]:
    """The weights of every map of the mixer."""
    found = {"out": mixer.out_proj.weight, "conditioner": mixer.conditioner.in_proj.weight}
    for projection in (mixer.prior_proj, mixer.value_proj):
        rows = projection.linear.weight.split(projection.widths)
        found |= dict(zip(projection.columns, rows, strict=True))
    return {name: weight.detach().clone() for name, weight in found.items()}


@pytest.mark.parametrize("start", ["paper", "prior"])
def test_the_benchmark_starts_what_attention_has_and_nothing_else(start: str) -> None:
    started = maps(mixer_of(model_of(prior="gla", start=start)))
    for name in ("q", "k", "v", "out"):
        bound = started[name].shape[1] ** -0.5
        assert 0.9 * bound < started[name].abs().max() <= bound, name
    for name in ("decay", "lam", "gate", "conditioner"):
        zero = start == "prior" and name in ("lam", "gate")
        assert started[name].std().item() == pytest.approx(0 if zero else 0.02, rel=0.15), name
    assert torch.equal(mixer_of(model_of()).raw_beta.detach(), torch.zeros(4, 8))
    before = maps(mixer_of(model_of(prior="gla", start=start)))
    after = maps(mixer_of(model_of(prior="gla", start=start, gates="torch")))
    for name, weight in after.items():
        assert torch.equal(weight, before[name]) == (name in ("q", "k", "v", "out")), name


def stepped(variant: Variant, steps: int) -> tuple[FreeEnergyMixer, dict[str, Tensor]]:
    """The mixer after some steps, and how it began."""
    model = model_of(variant.parts or "", start=variant.start)
    begin(model, variant)
    mixer = mixer_of(model)
    began = {name: p.detach().clone() for name, p in mixer.named_parameters()}
    optimizer = optimizer_of(model, variant, 1e-3, 0.0)
    ids = torch.randint(13, (5, 17), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return mixer, began


def test_a_variant_starts_lambda_beta_and_the_maps_of_gates() -> None:
    mixer, _ = stepped(VARIANTS["CLTG-lam-0.05-maps-normal"], 0)
    assert torch.allclose(mixer.lam_odds, torch.tensor(1 / 19))
    for rows in columns(mixer.value_proj.linear.weight, mixer.value_proj, "lam", "gate"):
        assert rows.std().item() == pytest.approx(0.02, rel=0.1)
    mixer, _ = stepped(VARIANTS["CLTG-beta-0.5"], 0)
    assert torch.allclose(mixer.beta_max, torch.tensor(0.5))
    for rows in columns(mixer.value_proj.linear.weight, mixer.value_proj, "lam", "gate"):
        assert not rows.any()


@pytest.mark.parametrize("name", ["q", "v", "lam"])
def test_a_column_without_the_conditioner_stays_so_while_others_learn(name: str) -> None:
    mixer, _ = stepped(Variant("CLTG", "paper", without=name), 3)
    for projection in (mixer.prior_proj, mixer.value_proj):
        for column in projection.columns:
            (rows,) = columns(projection.modulation, projection, column)
            assert bool(rows.any()) == (column != name), column


def test_gates_and_temperatures_learn_at_a_multiple_of_the_rate() -> None:
    def moved(rate: float) -> dict[str, float]:
        mixer, began = stepped(Variant("LTG", "prior", rate=rate), 1)
        after = dict(mixer.named_parameters())
        weight = after["value_proj.linear.weight"] - began["value_proj.linear.weight"]
        named = {name: (after[name] - began[name]).abs().max().item() for name in ("raw_beta", "lam_odds")}
        for column in ("v", "lam", "gate"):
            named[column] = columns(weight, mixer.value_proj, column)[0].abs().max().item()
        return named

    plain, fast = moved(1), moved(3)
    for name, distance in plain.items():
        assert fast[name] == pytest.approx(distance * (1 if name == "v" else 3), rel=0.02), name


def test_learning_is_told_from_the_curve() -> None:
    accuracies = [0.0, 0.2, 0.92, 0.97, 0.98]
    record = {
        "steps": 10,
        "evaluations": [{"step": step, "validation": {"accuracy": a}} for step, a in enumerate(accuracies)],
    }
    assert learned(record) == 2
    # 0.1 + 0.56 + 0.945 + 0.975 between the evaluations, then six steps at the last
    assert average(record) == pytest.approx((0.1 + 0.56 + 0.945 + 0.975 + 6 * 0.98) / 10)
    record["evaluations"] = record["evaluations"][:2]
    assert learned(record) is None


def test_variants_that_were_evaluated_at_other_steps_are_not_compared() -> None:
    stored = json.loads((Path(__file__).parent.parent / "benchmarks" / "mad-study.json").read_text())["records"]
    one, *rest = [record for record in stored if record["task"] == stored[0]["task"]]
    assert tabulate([one, *rest])
    other = {**one, "training": {**one["training"], "evaluate_every": one["training"]["evaluate_every"] + 1}}
    with pytest.raises(ValueError, match="results mix different ways of training"):
        tabulate([other, *rest])


def test_differences_from_attention_are_those_of_equal_seeds() -> None:
    stored = json.loads((Path(__file__).parent.parent / "benchmarks" / "mad-study.json").read_text())["records"]
    of_task = [record for record in stored if record["task"] == "fuzzy-recall"]
    scores = {(r["model"], r["seed"]): 100 * average(r) for r in of_task}
    differences = [scores["C", seed] - scores["attention", seed] for seed in range(3)]
    mean, spread = statistics.mean(differences), 4.302653 * statistics.stdev(differences) / 3**0.5  # t, two degrees
    (row,) = [row for row in tabulate(of_task)[0].groups[0].rows if row[0] == "C"]
    assert row[-2] == f"{mean:+.1f} [{mean - spread:+.1f}, {mean + spread:+.1f}]"


def test_a_study_is_run_shown_and_exported(tmp_path: Path, here: None, capsys: pytest.CaptureFixture[str]) -> None:
    store, file = tmp_path / "study", tmp_path / "study.json"
    asked = ["--variants", "attention", "CLTG-torch", "--tasks", "fuzzy-recall", "--seeds", "1"]
    short = ["--steps", "2", "--evaluate-every", "1", "--out", str(store)]
    assert main(["mad", "study", "run", *asked, *short]) == 0
    assert "0 of them finished before" in capsys.readouterr().err
    assert main(["mad", "study", "run", *asked, *short]) == 0
    assert "2 of them finished before" in capsys.readouterr().err
    assert main(["mad", "study", "export", "--results", str(store), "--out", str(file)]) == 0
    assert STUDY.load(file) == STUDY.load(store) and len(STUDY.load(file)) == 2
    assert main(["mad", "study", "table", "--results", str(file), "--out", str(tmp_path / "table")]) == 0
    assert "| CLTG-torch | > 2 | > 2 |" in (tmp_path / "table/table.md").read_text()
    assert main(["mad", "study", "run", "--variants", "CLTG-warm", "--out", str(store)]) == 2
    assert (
        "variants='CLTG-warm' is not allowed; choose different ones of attention, CLTG-paper" in capsys.readouterr().err
    )
