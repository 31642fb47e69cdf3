"""The channel-wise argmax: the paper's toy problem, and `femixer argmax`.

Every channel of a sequence hides one value that stands out, each at a position of its own, and the layer has to return
all of them at once. A convex read gives every channel of a head the same weights over positions, so softmax attention
cannot; the free energy weighs the positions for each channel by its own values, so FEM can.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from femixer.gates import inverse_temperature
from femixer.kernels.softmax import softmax_read
from femixer.optional import require
from femixer.options import Count, NotNegative, Positive, Rate, check, check_options, parse
from femixer.reporting import Table, as_markdown
from femixer.reporting.figures import figure, looks, plain_log, quiet
from femixer.training import Fit, Part, Results, RunOptions, TrainOptions, adamw, generator, show_table, train
from femixer.training.results import Record
from femixer.training.seeding import Epochs

MODELS = {"fem": "FEM", "attention": "softmax attention"}


@dataclass(frozen=True)
class Experiment:
    """The problem, the models and their training. The defaults suit two CPU cores; --paper gives the paper's."""

    length: int = 128
    """Positions T of a sequence."""
    channels: Count = 128
    """Channels D: values, queries and keys are this wide."""
    heads: Count = 2
    """Heads; each has its own weights over positions."""
    margin: Positive = 1.0
    """How far the winning value stands above the others."""
    noise: Positive = 0.05
    """Standard deviation of the values."""
    lr: Rate = 0.03
    """Learning rate of AdamW."""
    weight_decay: NotNegative = 0.01
    """Weight decay of the projection matrices; biases and temperatures have none."""
    batch: Count = 64
    """Sequences per step."""
    fixed_data: int | None = None
    """Draw this many training sequences once and reuse them in a new order each time; the paper has 200000.
    By default every sequence is new."""
    steps: Count = 800
    """Training steps."""
    validation: Count = 2000
    """Validation sequences."""
    evaluate_every: Count = 80
    """Steps between two evaluations, each of which also saves a checkpoint."""
    seed: int = 0
    """Seed of the data and of the initial weights."""

    def validate(self) -> None:
        """Raise a ValueError that names the first value that makes no sense."""
        check_options(self)
        enough = self.fixed_data is None or self.fixed_data >= self.batch
        check(enough, "fixed_data", self.fixed_data, f"a whole number of at least batch={self.batch}")
        check(self.length > 1, "length", self.length, "a whole number above 1")
        check(self.channels % self.heads == 0, "heads", self.heads, f"a divisor of channels={self.channels}")


PAPER = Experiment(channels=512, heads=4, lr=0.01, steps=2000, evaluate_every=100)


class Sample(NamedTuple):
    """Sequences and, for each channel, the position of the winner."""

    values: Tensor  # [N, T, D]
    winners: Tensor  # [N, D]

    @property
    def target(self) -> Tensor:
        """y*_j = max_i V_ij, [N, D]."""
        return self.values.amax(1)


def sample(count: int, experiment: Experiment, source: torch.Generator) -> Sample:
    """V_ij ~ N(0, noise^2), plus `margin` at i = a_j, with a_j uniform over the positions."""
    values = torch.randn(count, experiment.length, experiment.channels, generator=source).mul_(experiment.noise)
    winners = torch.randint(experiment.length, (count, experiment.channels), generator=source)
    bump = torch.tensor(experiment.margin).expand(count, 1, experiment.channels)
    return Sample(values.scatter_add_(1, winners[:, None], bump), winners)


def training_batch(experiment: Experiment, step: int) -> Sample:
    """Of fixed data every sequence is drawn by its number, so that the set (52 GB at the paper's sizes) is nowhere."""
    if experiment.fixed_data is None:
        return sample(experiment.batch, experiment, generator(experiment.seed, "argmax train", step))
    chosen = fixed_order(experiment.fixed_data, experiment.batch, experiment.seed)(step, Part(0, 1))
    rows = [sample(1, experiment, generator(experiment.seed, "argmax fixed", int(number))) for number in chosen]
    return Sample(*(torch.cat(part) for part in zip(*rows, strict=True)))


@cache
def fixed_order(count: int, batch: int, seed: int) -> Epochs:
    return Epochs(count, batch, seed)


def validation_batches(experiment: Experiment) -> list[Sample]:
    """The validation set, cut to the size of a training batch to bound the memory of an evaluation."""
    whole = sample(experiment.validation, experiment, generator(experiment.seed, "argmax validation"))
    return [Sample(*part) for part in zip(*(each.split(experiment.batch) for each in whole), strict=True)]


def index_correct(prediction: Tensor, data: Sample) -> Tensor:
    """Is the value nearest to the prediction the winner? argmin_i |V_ij - y_j| = a_j, bool [N, D]."""
    return (data.values - prediction[:, None]).abs_().argmin(1) == data.winners


class LastRead(nn.Module):
    """What one layer reads at the last position T, straight from its input: V [N, T, D] -> [N, D].

    Per head p(i) = softmax_i(q_T . k_i / sqrt(width)), with queries and keys projected from V. There is no value or
    output projection, no gate and no convolution, so that the two models differ in the read alone:

        attention    mu_j = sum_i p(i) V_ij
        FEM          (1 - lam_j) mu_j + lam_j F_j,    F_j = log(sum_i p(i) exp(beta_j V_ij)) / beta_j,
                     lam = sigmoid(W V_T + b),  beta = softplus(x + 1.8)

    At the last position a causal layer sees everything, and only its query is needed.
    """

    def __init__(self, channels: int, heads: int, free_energy: bool, source: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(channels, channels)
        self.key = nn.Linear(channels, channels)
        self.temperature = nn.Linear(channels, channels) if free_energy else None
        self.beta_shift = nn.Parameter(torch.zeros(heads, channels // heads)) if free_energy else None
        for projection in self.children():
            if isinstance(projection, nn.Linear):
                nn.init.normal_(projection.weight, std=0.02, generator=source)
                nn.init.zeros_(projection.bias)

    @property
    def beta_max(self) -> Tensor | None:
        """Inverse temperature [H, D/H]; None for attention."""
        return None if self.beta_shift is None else inverse_temperature(self.beta_shift)

    def forward(self, values: Tensor) -> Tensor:
        last = values[:, -1:]
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in (self.query(last), self.key(values), values))
        mu, free_energy = softmax_read(q, k, v, self.beta_max, causal=False)
        read = mu.flatten(1)
        if self.temperature is None or free_energy is None:
            return read
        lam = self.temperature(last[:, 0]).sigmoid()
        return torch.lerp(read, free_energy.flatten(1), lam)


class SideBySide(nn.ModuleDict):
    """Models that share no parameter, trained on the same batches, each as it would be alone."""

    def forward(self, values: Tensor) -> dict[str, Tensor]:
        return {name: model(values) for name, model in self.items()}


def build(experiment: Experiment) -> SideBySide:
    """Both models, from the same initial queries and keys."""
    sizes = (experiment.channels, experiment.heads)
    weights = {name: generator(experiment.seed, "argmax weights") for name in MODELS}
    return SideBySide({name: LastRead(*sizes, name == "fem", source) for name, source in weights.items()})


def losses(models: nn.Module, data: Sample) -> dict[str, Tensor]:
    """Squared error summed over all channels, for each model."""
    target = data.target
    return {name: functional.mse_loss(y, target, reduction="sum") for name, y in models(data.values).items()}


def evaluate(models: SideBySide, batches: Sequence[Sample]) -> Iterator[Record]:
    """Mean squared error and index accuracy over all channels of all validation sequences, for each model."""
    channels = sum(data.winners.numel() for data in batches)
    for name, model in models.items():
        assert isinstance(model, LastRead)
        squared, correct = 0.0, 0
        for data in batches:
            data = Sample(*(tensor.to(model.query.weight.device) for tensor in data))
            prediction = model(data.values)
            squared += (prediction - data.target).square().sum().item()
            correct += int(index_correct(prediction, data).sum())
        beta = model.beta_max
        yield {
            "model": name,
            "mse": squared / channels,
            "accuracy": correct / channels,
            "beta": None if beta is None else beta.mean().item(),
        }


def run(experiment: Experiment, options: RunOptions) -> Results:
    """Train and evaluate both models; the folder then holds the metrics, the figure and the table."""
    experiment.validate()
    options.apply()
    results = Results("argmax", experiment, options)
    if results.finished:
        return results
    models = build(experiment)
    validation = validation_batches(experiment)
    fit = Fit(
        model=models,
        optimizer=lambda models: adamw(models, experiment.lr, experiment.weight_decay),
        batch=lambda step, part: Sample(*(x[part.rows(len(x))] for x in training_batch(experiment, step))),
        losses=losses,
        items=lambda data: data.winners.numel(),
        evaluate=lambda models: evaluate(models, validation),
    )
    train(fit, TrainOptions(experiment.steps, experiment.evaluate_every, experiment.seed), results)
    metrics = results.metrics()
    results.write_figure(curves(experiment, metrics))
    results.finish(as_markdown(table(experiment, models, metrics)))
    return results


def table(experiment: Experiment, models: SideBySide, metrics: Sequence[Record]) -> Table:
    """The last evaluation of each model."""
    last = {record["model"]: record for record in metrics}
    rows = []
    for name, label in MODELS.items():
        parameters = sum(p.numel() for p in models[name].parameters())
        mse, accuracy, beta = (last[name][key] for key in ("mse", "accuracy", "beta"))
        shown = "" if beta is None else f"{beta:.2f}"
        rows.append([label, str(parameters), f"{mse:.4f}", f"{accuracy:.2%}", shown])
    rows.append(["guessing", "0", "", f"{1 / experiment.length:.2%}", ""])
    return Table.of(
        ("model", "parameters", "validation MSE", "index accuracy", "mean beta_max"),
        rows,
        f"Channel-wise argmax: length {experiment.length}, {experiment.channels} channels, {experiment.heads} heads, "
        f"{experiment.steps} steps, seed {experiment.seed}; {experiment.validation} validation sequences.",
    )


def curves(experiment: Experiment, metrics: Sequence[Record]) -> Any:
    """Validation error (left) and index accuracy (right) against training steps, for both models."""
    drawing = figure(9.0, 3.8)
    error, accuracy = drawing.subplots(1, 2)
    panels = {"mse": (error, "Validation error"), "accuracy": (accuracy, "Winner found (index accuracy)")}
    for key, (axes, title) in panels.items():
        for name, style in looks([*MODELS]).items():
            points = [(record["step"], record[key]) for record in metrics if record["model"] == name]
            look = {**style, "label": MODELS[name], "linewidth": 2, "markersize": 4, "clip_on": False, "zorder": 3}
            axes.plot(*zip(*points, strict=True), **look)
        axes.set(xlabel="training steps", xlim=(0, experiment.steps))
        axes.set_title(title, loc="left")
        quiet(axes)
    error.set(ylabel="mean squared error", yscale="log")
    plain_log(error.yaxis)
    accuracy.set(ylabel="share of channels", ylim=(-0.03, 1.03))
    accuracy.yaxis.set_major_formatter(require("matplotlib.ticker", "plot").PercentFormatter(1))
    chance = 1 / experiment.length
    accuracy.axhline(chance, color="black", linestyle=":", zorder=4, label=f"guessing, 1/{experiment.length}")
    accuracy.legend(frameon=False, loc="center right")
    drawing.suptitle(
        f"One layer picks the largest of {experiment.length} values in each of {experiment.channels} channels "
        f"({experiment.heads} heads)"
    )
    return drawing


@dataclass(frozen=True)
class Command:
    """Choose the largest value of each channel: one layer of FEM against one of softmax attention.

    Both are trained on the same data, fresh at every step unless --fixed-data is given. The results folder gets
    config.json, metrics.jsonl, figure.png and table.md.
    """

    experiment: Experiment
    run: RunOptions
    paper: bool = False
    """Start from the paper's setting (512 channels, 4 heads, lr 0.01, 2000 steps); other options still apply.
    Its data set of 200000 is --fixed-data 200000, of which 2000 steps see 128000."""


def main(args: Sequence[str]) -> int:
    default = Command(Experiment(), RunOptions(Path("results/argmax")))
    if "--paper" in args:  # another set of defaults, so it is looked for before the options are read
        default = replace(default, experiment=PAPER, run=RunOptions(Path("results/argmax-paper")))
    command = parse(Command, args, "argmax", default)
    return show_table(run(command.experiment, command.run))
