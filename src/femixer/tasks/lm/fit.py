"""Training a language model: what decides its numbers, the losses, samples, curves, and what is kept of it."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig

from femixer.damage import read_json, read_lines
from femixer.models import Card, FEMForCausalLM, preset
from femixer.models.files import without_bars
from femixer.models.named import parameter_count
from femixer.optional import require
from femixer.options import BelowOne, Count, NotNegative, Positive, Rate, Share, Whole, as_typed, check, check_options
from femixer.parallel import own_tokens, parallelize, summed_over_cut
from femixer.reporting import Column, Table, as_markdown
from femixer.reporting.figures import BLUE, figure, plain_log, quiet
from femixer.tasks.lm.data import DataOptions
from femixer.tasks.lm.data.shards import IGNORED, Batch, Batches, Shards, Validation
from femixer.tasks.lm.model import ModelOptions, build
from femixer.training import distributed
from femixer.training.engine import EngineOptions, check_fits, full_weights
from femixer.training.journal import counting
from femixer.training.loop import Fit, TrainOptions, adamw, cosine, train
from femixer.training.results import CONFIG, METRICS, MODEL, Record, Results, RunOptions, new_model


def summed_loss(model: Any, batch: Batch) -> Tensor:
    """The sum of -log p(target) over the scored tokens of a batch, in nats."""
    logits = model(batch.inputs, segments=documents(batch.segments), use_cache=False).logits
    targets = own_tokens(model, batch.targets).flatten()
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=IGNORED, reduction="sum")
    return summed_over_cut(model, loss)


LARGE = 4e9
"""Bytes of logits that are worth a warning."""


def warn_of_logits(tokens: int, vocabulary: int) -> None:
    """Logits, their log-probabilities and gradients, in float32, of the tokens of one piece of a batch."""
    size = 12 * tokens * vocabulary
    if size > LARGE:
        what = f"{tokens:,} tokens and a vocabulary of {vocabulary:,} take {size / 1e9:.0f} GB at once"
        distributed.say(f"warning: the logits of {what}; --accumulate makes pieces of a batch")


def documents(segments: Tensor) -> Tensor | None:
    """None where every row is one document without padding: reads that need no mask are faster."""
    whole = bool((segments == segments[:, :1]).all()) and bool((segments[:, 0] >= 0).all())
    return None if whole else segments


def scored(batch: Batch) -> int:
    """Tokens that the loss is over."""
    return int((batch.targets != IGNORED).sum())


def evaluate(model: Any, validation: Validation) -> Iterator[Record]:
    """Loss, perplexity and bits per byte of text, over the held-out windows; the processes share the work."""
    device = next(model.parameters()).device
    nats, tokens = 0.0, 0
    with counting(len(validation), "batches of held-out text") as told:
        for batch in validation.batches(distributed.part()):
            nats += float(summed_loss(model, Batch(*(x.to(device) for x in batch))))
            tokens += scored(batch)
            told(1)
    nats, count = distributed.total(nats, tokens)
    loss = nats / count
    yield {
        "split": "validation",
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": nats / (math.log(2) * validation.bytes),
    }


def draw(metrics: Sequence[Record], batch_tokens: int) -> Any:
    """Losses in training and of held-out text; that of the untrained model is left out, it would stretch the axis."""
    drawing = figure(7.5, 4.2)
    axes = drawing.subplots()
    train = {"color": "0.7", "linewidth": 1, "label": "training batches"}
    validation = {"color": BLUE, "linewidth": 1.8, "label": "validation"}
    for split, look in (("train", train), ("validation", validation)):
        points = [(each["step"] * batch_tokens, each["loss"]) for each in metrics if each.get("split") == split]
        axes.plot(*zip(*[point for point in points if point[0]], strict=True), **look)
    axes.set(xlabel="training tokens", ylabel="loss (nats per token)", yscale="log")
    ticker = require("matplotlib.ticker", "plot")
    plain_log(axes.yaxis, (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8))
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    quiet(axes)
    axes.legend(frameon=False, fontsize=8)
    return drawing


@dataclass(frozen=True)
class Experiment:
    """Training options; with the text they determine the numbers of a run."""

    model: ModelOptions = field(default_factory=ModelOptions)
    context: Count | None = None
    """Tokens of a training sequence, by default the preset's."""
    batch_tokens: Count = 4096
    """Tokens of a batch, over all processes and accumulated pieces: a multiple of the context."""
    steps: Count | None = None
    """Batches to train on, by default 1000."""
    tokens: Count | None = None
    """Tokens to train on, instead of --steps."""
    lr: Rate = 2e-3
    """Largest learning rate; it rises linearly, then falls like a cosine."""
    min_lr_fraction: Share = 0.1
    """Share of the largest learning rate that is left at the end."""
    warmup_steps: int | None = None
    """Warm-up in batches, by default a twentieth of the run."""
    warmup_tokens: int | None = None
    """Warm-up in tokens, instead of --warmup-steps."""
    weight_decay: NotNegative = 0.1
    """Weight decay of matrices (AdamW)."""
    clip: Positive | None = 1.0
    """Largest norm of the gradient."""
    beta1: BelowOne = 0.9
    """AdamW's beta1, the decay of its gradient average."""
    beta2: BelowOne = 0.95
    """AdamW's beta2, the decay of its average of squared gradients."""
    seed: int = 0
    """Seed of the weights, of the order of the text and of dropout."""
    evaluate_every: Count = 200
    """Steps between two evaluations."""
    validation_tokens: Count | None = 65536
    """Tokens of the held-out text to evaluate on (rounded up to whole sequences); None takes all."""
    prompt: str = ""
    """Beginning of the texts that are sampled at every evaluation."""
    sample_tokens: Whole = 128
    """Largest number of tokens of a sample, limited by the context; 0: no samples."""

    def validate(self) -> None:
        """Everything that can be known before the text is."""
        check_options(self)
        for name in ("", "warmup_"):
            steps, tokens = getattr(self, name + "steps"), getattr(self, name + "tokens")
            either = f"either {name}steps or {name}tokens ({tokens}), and None for the other"
            check(steps is None or tokens is None, name + "steps", steps, either)
        enough = self.length > 1 or self.sample_tokens == 0
        check(enough, "context", self.length, "at least 2, or no samples (sample_tokens 0)")
        name = "warmup_steps" if self.warmup_tokens is None else "warmup_tokens"
        check(0 <= self.warmup <= self.count, name, getattr(self, name), f"at most the run's {self.duration}")
        parameter_count(self.model.config(self.length))  # its layers say themselves what they cannot be

    @property
    def length(self) -> int:
        """Tokens of a training sequence."""
        return self.context or preset(self.model.preset).max_position_embeddings

    @property
    def count(self) -> int:
        """Steps of the run."""
        return (self.steps or 1000) if self.tokens is None else -(-self.tokens // self.batch_tokens)

    @property
    def warmup(self) -> int:
        """Steps of the rise."""
        if self.warmup_tokens is not None:
            return -(-self.warmup_tokens // self.batch_tokens)
        return self.count // 20 if self.warmup_steps is None else self.warmup_steps

    @property
    def duration(self) -> str:
        return f"{self.count:,} steps of {self.batch_tokens:,} tokens"

    def sequences(self, processes: int, accumulate: int) -> int:
        """Sequences of a batch, which all processes and the pieces that they make of it share evenly."""
        unit = self.length * processes * accumulate
        why = f"context {self.length} x processes {processes} x accumulate {accumulate}"
        check(self.batch_tokens % unit == 0, "batch_tokens", self.batch_tokens, f"a multiple of {unit} ({why})")
        return self.batch_tokens // self.length


@dataclass(frozen=True)
class Decided(Experiment):
    """What a resumed run must agree in."""

    text: str = ""
    vocabulary: int = 0


def check_possible(experiment: Experiment, engine: EngineOptions) -> int:
    """Sequences of a batch; a ValueError for all that can be wrong before the text is known."""
    experiment.validate()
    engine.validate()
    sequences = experiment.sequences(engine.parts(distributed.world()), engine.accumulate)
    if engine.context_parallel > 1:
        why = "0 with context_parallel: no text is generated by parts of a sequence"
        check(experiment.sample_tokens == 0, "sample_tokens", experiment.sample_tokens, why)
    config = experiment.model.config(experiment.length)
    check_fits(parameter_count(config), "hidden_size", config.hidden_size)
    return sequences


def of_text(shards: Shards, experiment: Experiment, engine: EngineOptions) -> tuple[Batches, Validation]:
    """Batches to train on and text to evaluate on; a ValueError for what else can be wrong before anything is
    written."""
    sequences = check_possible(experiment, engine)
    config = experiment.model.config(experiment.length, vocab_size=shards.vocabulary)
    check_fits(parameter_count(config), "vocabulary", shards.vocabulary)
    batches = Batches(shards, experiment.length, sequences, experiment.seed)
    windows = None if experiment.validation_tokens is None else -(-experiment.validation_tokens // experiment.length)
    # Whoever needs a batch in pieces has no memory for all of it at an evaluation either.
    validation = Validation(shards, experiment.length, sequences // engine.accumulate, windows)
    _ = shards.tokenizer
    if experiment.sample_tokens:
        sample_prompt(shards, experiment)
    return batches, validation


def trained(
    experiment: Experiment, data: DataOptions, engine: EngineOptions, options: RunOptions, text: str = ""
) -> Results:
    """Train, evaluate and save a model; the folder then holds everything about it. text: which one it is, in words."""
    text = text or data.described()
    options.apply()
    check_possible(experiment, engine)
    shards = data.tokens()
    batches, validation = of_text(shards, experiment, engine)
    decided = Decided(**vars(experiment), text=shards.fingerprint, vocabulary=shards.vocabulary)
    results = Results("lm", decided, options, about={"text": text})
    if results.finished:
        return results
    warn_of_logits(batches.tokens // (engine.parts(distributed.world()) * engine.accumulate), shards.vocabulary)
    tokens = {"vocab_size": shards.vocabulary, "bos_token_id": shards.start_token, "eos_token_id": shards.end_token}
    model = build(experiment.model.config(experiment.length, **tokens), experiment.seed)
    fit = Fit(
        model=model,
        optimizer=lambda model: adamw(
            model, experiment.lr, experiment.weight_decay, (experiment.beta1, experiment.beta2)
        ),
        batch=lambda step, part: batches(step - 1, part),
        losses=lambda model, piece: {"loss": summed_loss(model, piece)},
        items=scored,
        evaluate=lambda model: evaluate(model, validation),
        samples=lambda model: samples(model, shards, experiment),
        divide=lambda model, mesh, shard: parallelize(model, mesh, shard=shard),
    )
    course = TrainOptions(
        steps=experiment.count,
        evaluate_every=experiment.evaluate_every,
        seed=experiment.seed,
        schedule=cosine(experiment.count, experiment.warmup, experiment.min_lr_fraction),
        clip=experiment.clip,
        tokens=batches.tokens,
        log_every=min(10, experiment.evaluate_every, experiment.count),
        engine=engine,
    )
    train(fit, course, results)
    weights = full_weights(model)
    distributed.on_main(lambda: finish(results, model, weights, shards, experiment, text))
    return results


def sample_prompt(shards: Shards, experiment: Experiment) -> list[int]:
    """The tokens that a sample begins with; a ValueError unless the model can go on from there within its context."""
    prompt = [shards.start_token, *shards.tokenizer.encode(experiment.prompt, add_special_tokens=False)]
    shorter = f"a text of fewer than {experiment.length - 1} tokens, for a context of {experiment.length}"
    check(len(prompt) < experiment.length, "prompt", experiment.prompt, shorter)
    return prompt


def samples(model: Any, shards: Shards, experiment: Experiment) -> Iterator[Record]:
    """One text that begins with the prompt, drawn from the model."""
    if experiment.sample_tokens == 0:
        return
    tokenizer, prompt = shards.tokenizer, sample_prompt(shards, experiment)
    ids = torch.tensor([prompt], device=next(model.parameters()).device)
    # Every process draws the same tokens, and as many: a sharded model is computed by all of them together.
    text = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=GenerationConfig(
            do_sample=True,
            temperature=0.8,
            max_new_tokens=min(experiment.sample_tokens, experiment.length - len(prompt)),
            eos_token_id=shards.end_token,
            pad_token_id=shards.end_token,
        ),
    )
    yield {"prompt": experiment.prompt, "text": tokenizer.decode(text[0, len(prompt) :], skip_special_tokens=True)}


def finish(
    results: Results,
    model: FEMForCausalLM,
    weights: dict[str, Tensor],
    shards: Shards,
    experiment: Experiment,
    text: str,
) -> None:
    """Save the model, and write figure and table: what makes the run finished comes last."""
    model.generation_config.pad_token_id = shards.end_token  # for prompts of several lengths
    metrics = results.metrics()
    scores = {name: last(metrics)[name] for name in ("loss", "perplexity", "bits_per_byte")}
    model.card = Card(
        data=f"{text}: {shards.train.tokens:,} tokens of {shards.train.documents:,} documents. Metrics are of held-out "
        f"text ({shards.validation.documents:,} documents) after {experiment.duration}.",
        command=as_typed(),
        metrics={f"validation {name.replace('_', ' ')}": value for name, value in scores.items()},
    )
    with new_model(results.folder / MODEL) as partial, without_bars():
        model.save_pretrained(partial, state_dict=weights)
        shards.tokenizer.save_pretrained(partial)
    results.write_figure(draw(metrics, experiment.batch_tokens))
    results.finish(as_markdown(summary(experiment, model, metrics, text)))


def summary(experiment: Experiment, model: FEMForCausalLM, metrics: Sequence[Record], text: str) -> Table:
    options, end = experiment.model, last(metrics)
    mixer = ", ".join(options.mixer) + (
        f" ({' '.join(options.prior)}, parts {options.parts or 'none'})" if "fem" in options.mixer else ""
    )
    row = [f"{model.num_parameters():,}", f"{end['loss']:.4f}", f"{end['perplexity']:.3f}"]
    row += [f"{end['bits_per_byte']:.4f}", f"{rate(metrics):,.0f}"]
    titles = ("parameters", "validation loss", "perplexity", "bits per byte", "tokens/s")
    chosen = {name: getattr(options, name) for name in ("hidden_size", "layers", "heads", "kv_heads")}
    sizes = ", ".join(f"{name} {value}" for name, value in chosen.items() if value is not None)
    size = f"{options.preset} ({sizes})" if sizes else options.preset
    title = f"Language model {size}, {mixer}: {experiment.duration}, seed {experiment.seed}. Text: {text}."
    return Table.of([Column(name, align="right") for name in titles], [row], title)


def last(metrics: Sequence[Record]) -> Record:
    """The evaluation after the last step."""
    return [record for record in metrics if record["split"] == "validation"][-1]


def rate(metrics: Sequence[Record]) -> float:
    """Training tokens per second."""
    return statistics.median(record["tokens_per_second"] for record in metrics if record["split"] == "train")


def recorded(folder: Path, model: str, text: str, setting: Mapping[str, Any]) -> Record:
    """What is kept of a finished run in `folder`: `setting` has the options that all runs it is compared with share.

    Options of the mixers that the name of the model leaves open are told behind it, as in `FEM-SM, start=prior`. They
    do not make another setting.
    """
    run, metrics = read_json(folder / CONFIG)["experiment"], read_lines(folder / METRICS)
    own = {name: value for name, value in run["model"].get("mixing", {}).items() if value is not None}
    shared = {name: value for name, value in setting.items() if name != "seed"}
    shared["model"] = {name: value for name, value in shared["model"].items() if name != "mixing"}
    end = last(metrics)
    return {
        "model": ", ".join([model, *(f"{name}={value}" for name, value in own.items())]),
        "seed": run["seed"],
        "text": ", ".join(Path(each).name if Path(each).is_absolute() else each for each in text.split(", ")),
        "fingerprint": run.get("text"),
        "loss": end["loss"],
        "bits_per_byte": end.get("bits_per_byte"),
        "experiment": shared,
        "fields": run["model"],
        "run": folder.name,
        "curve": [[record["step"], record["loss"]] for record in metrics if record["split"] == "validation"],
    }
