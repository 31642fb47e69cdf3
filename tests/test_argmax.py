"""The toy problem: its data, its metric, its two models and the command."""

import json
import math
import re
import shlex
from dataclasses import replace

import pytest
import torch

from femixer.cli import main
from femixer.tasks.argmax import (
    PAPER,
    Experiment,
    LastRead,
    Sample,
    build,
    evaluate,
    index_correct,
    losses,
    sample,
    training_batch,
    validation_batches,
)
from femixer.training import adamw, generator

SMALL = Experiment(length=13, channels=15, heads=3, steps=5, evaluate_every=2, batch=7, validation=11)


def draw(experiment=SMALL, count=300):
    return sample(count, experiment, generator(0, "test"))


def test_the_paper_setting_is_the_papers():
    assert (PAPER.length, PAPER.channels, PAPER.heads) == (128, 512, 4)
    assert (PAPER.margin, PAPER.noise, PAPER.lr, PAPER.batch, PAPER.steps) == (1.0, 0.05, 0.01, 64, 2000)
    assert PAPER.validation == 2000


def test_winners_are_uniform_over_positions():
    winners = draw().winners
    counts = torch.bincount(winners.flatten(), minlength=13).double()
    expected = winners.numel() / 13
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_squared < 32.9  # exceeded with probability 0.001 at 12 degrees of freedom


def test_winners_of_different_channels_are_independent():
    winners = draw(count=2000).winners
    agreement = (winners[:, :-1] == winners[:, 1:]).double().mean().item()
    assert agreement == pytest.approx(1 / 13, abs=4 * math.sqrt(1 / 13 / (2000 * 14)))


def test_values_are_noise_and_the_winner_stands_above_by_the_margin():
    experiment = Experiment(length=13, channels=15, heads=3, margin=2.0, noise=0.3)
    data = draw(experiment)
    winning = data.values.gather(1, data.winners[:, None])[:, 0]
    others = data.values.scatter(1, data.winners[:, None], float("nan"))
    others = others[~others.isnan()]
    for values, mean in ((winning, 2.0), (others, 0.0)):
        assert values.mean().item() == pytest.approx(mean, abs=4 * 0.3 / math.sqrt(values.numel()))
        assert values.std().item() == pytest.approx(0.3, rel=4 / math.sqrt(2 * values.numel()))


def test_target_is_the_maximum_over_positions_and_the_winners_value():
    data = draw()
    assert data.target.shape == (300, 15)
    assert (data.target[:, None] >= data.values).all()
    assert torch.equal(data.target, data.values.gather(1, data.winners[:, None])[:, 0])


def test_index_accuracy_of_a_case_worked_by_hand():
    #                         channel 0: winner at 1, channel 1: winner at 2
    values = torch.tensor([[[0.1, 0.0], [1.0, -0.2], [-0.1, 0.9]]])
    data = Sample(values, torch.tensor([[1, 2]]))
    assert index_correct(torch.tensor([[0.56, 0.44]]), data).tolist() == [[True, False]]  # nearest: 1.0 and 0.0
    assert index_correct(torch.tensor([[0.54, 0.46]]), data).tolist() == [[False, True]]  # nearest: 0.1 and 0.9


def test_the_perfect_prediction_scores_one_and_the_mean_scores_near_chance():
    data = sample(200, Experiment(), generator(0, "test"))
    assert index_correct(data.target, data).all()
    assert index_correct(data.values.mean(1), data).double().mean().item() < 2 / 128


def test_evaluation_reports_error_and_accuracy_over_the_whole_validation_set():
    batches = validation_batches(SMALL)
    assert [len(data.winners) for data in batches] == [7, 4]
    models = build(SMALL)
    with torch.no_grad():
        records = {record["model"]: record for record in evaluate(models, batches)}
    whole = Sample(*(torch.cat(part) for part in zip(*batches, strict=True)))
    for name, model in models.items():
        prediction = model(whole.values)
        error = (prediction - whole.values.max(1).values).square().mean().item()
        assert records[name]["mse"] == pytest.approx(error, rel=1e-5)
        accuracy = index_correct(prediction, whole).double().mean().item()
        assert records[name]["accuracy"] == pytest.approx(accuracy)
    assert records["fem"]["beta"] == pytest.approx(math.log1p(math.exp(1.8)))
    assert records["attention"]["beta"] is None


def test_training_batches_depend_on_seed_and_step_and_never_repeat():
    first = training_batch(SMALL, 1).values
    assert torch.equal(first, training_batch(SMALL, 1).values)
    others = [training_batch(SMALL, 2), training_batch(Experiment(**{**vars(SMALL), "seed": 1}), 1)]
    assert not any(torch.equal(first, other.values) for other in others)


def test_fixed_data_is_drawn_once_and_shown_in_another_order_each_time():
    """17 sequences in three steps: all of them, none twice, and the same 17 in the next three. Nothing that the
    default draws depends on it."""
    fixed = replace(SMALL, fixed_data=17)
    epochs = [torch.cat([training_batch(fixed, step).values for step in steps]) for steps in ((1, 2, 3), (4, 5, 6))]
    ordered = [sorted(sequence.flatten().tolist() for sequence in epoch) for epoch in epochs]
    assert len(ordered[0]) == 17 and ordered[0] == ordered[1]
    assert len({tuple(sequence) for sequence in ordered[0]}) == 17
    assert not torch.equal(*epochs)
    assert torch.equal(training_batch(fixed, 2).values, training_batch(fixed, 2).values)
    assert not torch.isin(epochs[0], training_batch(SMALL, 1).values).any()
    batch = training_batch(fixed, 2)
    assert torch.equal(batch.target, batch.values.gather(1, batch.winners[:, None])[:, 0])


def test_no_training_sequence_is_a_validation_sequence():
    held_out = torch.cat([data.values for data in validation_batches(SMALL)])
    for step in range(1, 6):
        assert torch.isin(training_batch(SMALL, step).values, held_out).double().mean().item() < 0.01  # chance equals


def reference(model: LastRead, values: torch.Tensor) -> torch.Tensor:
    """The formulas of LastRead, channel by channel in float64."""
    model, values = model.double(), values.double()
    width = values.shape[-1] // model.heads
    q, k = model.query(values[:, -1]), model.key(values)
    reads = []
    for channel in range(values.shape[-1]):
        head = slice(channel // width * width, channel // width * width + width)
        p = torch.einsum("ne,nse->ns", q[:, head], k[:, :, head]).div(math.sqrt(width)).softmax(-1)
        v = values[..., channel]
        read = (p * v).sum(1)
        if model.temperature is not None:
            beta = torch.log1p(torch.exp(model.beta_shift[channel // width, channel % width] + 1.8))
            lam = model.temperature(values[:, -1])[:, channel].sigmoid()
            read = (1 - lam) * read + lam * (p * (beta * v).exp()).sum(1).log() / beta
        reads.append(read)
    return torch.stack(reads, 1)


@pytest.mark.parametrize("free_energy", [False, True])
def test_the_layer_computes_its_formula(free_energy):
    model = LastRead(15, 3, free_energy, generator(0, "weights"))
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.normal_(parameter, generator=generator(0, "parameter", number))
    values = draw(count=7).values
    read = model(values)
    torch.testing.assert_close(read.double(), reference(model, values), atol=1e-5, rtol=1e-5)


def test_attention_cannot_leave_the_convex_hull_and_the_free_energy_can():
    """Two channels with winners at different positions: no convex read reaches both, a large beta does."""
    values = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]])
    attention, fem = (LastRead(2, 1, free_energy, generator(0, "weights")) for free_energy in (False, True))
    assert attention(values).sum().item() <= 1.0 + 1e-6
    with torch.no_grad():
        fem.beta_shift.fill_(200.0)
        fem.temperature.bias.fill_(50.0)
    assert fem(values).min().item() > 0.99


def test_both_models_start_from_the_same_queries_and_keys():
    models = build(SMALL)
    for name, parameter in models["attention"].named_parameters():
        assert torch.equal(parameter, models["fem"].get_parameter(name))


def test_training_side_by_side_equals_training_alone():
    def trained(names):
        models = build(SMALL)
        for name in set(models) - set(names):
            del models[name]
        optimizer = adamw(models, SMALL.lr)
        for step in range(4):
            optimizer.zero_grad()
            sum(losses(models, training_batch(SMALL, step)).values()).backward()
            optimizer.step()
        return models

    together = trained(["fem", "attention"])
    for name in together:
        for alone, beside in zip(trained([name])[name].parameters(), together[name].parameters(), strict=True):
            assert torch.equal(alone, beside)


OPTIONS = shlex.split("--length 13 --channels 15 --heads 3 --batch 7 --validation 11 --steps 5 --evaluate-every 2")


def test_the_command_fills_the_results_folder(tmp_path, capsys):
    assert main(["argmax", *OPTIONS, "--out", str(tmp_path / "run")]) == 0
    folder = tmp_path / "run"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["model"]) for record in metrics] == [
        (step, model) for step in (0, 2, 4, 5) for model in ("fem", "attention")
    ]
    assert set(metrics[0]) == {"model", "step", "mse", "accuracy", "beta", "seconds"}
    table = (folder / "table.md").read_text()
    for label, record in (("FEM", metrics[-2]), ("softmax attention", metrics[-1])):
        row = re.search(rf"\| {label} \| \d+ \| (.*) \| (.*)% \|", table)
        assert float(row[1]) == pytest.approx(record["mse"], abs=1e-4)
        assert float(row[2]) == pytest.approx(100 * record["accuracy"], abs=1e-2)
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "config.json").read_text())["experiment"]["channels"] == 15
    shown = capsys.readouterr()
    assert table in shown.out
    assert len(shown.err.splitlines()) == 4  # one line per evaluation where nobody watches


def test_resuming_a_finished_run_prints_its_table_and_computes_nothing(tmp_path, capsys, monkeypatch):
    def not_again(*args, **options):
        raise AssertionError("trained a finished run")

    command = ["argmax", *OPTIONS, "--out", str(tmp_path)]
    main(command)
    metrics = (tmp_path / "metrics.jsonl").read_text()
    first = capsys.readouterr().out
    monkeypatch.setattr("femixer.tasks.argmax.train", not_again)
    monkeypatch.setattr("femixer.tasks.argmax.build", not_again)
    assert main([*command, "--resume"]) == 0
    assert capsys.readouterr().out == first
    assert (tmp_path / "metrics.jsonl").read_text() == metrics


def test_paper_is_a_set_of_defaults_that_other_options_change(tmp_path):
    small = shlex.split("--length 13 --batch 2 --validation 2 --steps 1")
    assert main(["argmax", "--paper", *small, "--out", str(tmp_path)]) == 0
    experiment = json.loads((tmp_path / "config.json").read_text())["experiment"]
    assert experiment == {**vars(PAPER), "length": 13, "batch": 2, "validation": 2, "steps": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 0", "steps=0 is not allowed; choose a whole number above 0"),
        ("--lr -1", "lr=-1.0 is not allowed; choose a number above 0 that float32 holds"),
        ("--heads 7", "heads=7 is not allowed; choose a divisor of channels=128"),
        ("--length 1", "length=1 is not allowed; choose a whole number above 1"),
        ("--fixed-data 63", "fixed_data=63 is not allowed; choose a whole number of at least batch=64"),
        ("--threads 0", "threads=0 is not allowed; choose a whole number above 0"),
        ("--threads 1000000000", "threads=1000000000 is not allowed; choose a whole number up to 1024"),
    ],
)
def test_bad_values_give_one_line_and_exit_code_two(tmp_path, capsys, options, message):
    assert main(["argmax", *options.split(), "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not (tmp_path / "run").exists()
