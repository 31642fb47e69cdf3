"""`femixer bench layer`: the rival is attention, parameters are those worked out by hand, targets keep their size."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from femixer import FreeEnergyMixer, bench
from femixer.bench.calls import peak_memory
from femixer.bench.contestants import Mixer, Parameters, canonical
from femixer.bench.layer import (
    DECODE_SIZE,
    FLOPS_NOTE,
    LINEAR_TIME_SIZE,
    SOFTMAX_SIZE,
    Entry,
    Options,
    SequenceCost,
    Target,
    contestants,
    run,
    sequence_target,
    tables,
)
from femixer.bench.measure import Timing
from femixer.layout import Layout
from femixer.priors import PRIORS, Prior, parse_prior
from femixer.projection import Columns

CPU = torch.device("cpu")
TINY = Options(
    dim=24, heads=3, lengths=(13,), batch=2, modes=("eager",), context=17, decode_steps=2, rounds=2, warmup=1, threads=1
)


def test_parameters_are_those_worked_out_by_hand() -> None:
    mixers = Mixer(), Mixer("softmax", "LTG"), Mixer("softmax", "CLTG")
    attention, plain, full = (Parameters.of(mixer, TINY) for mixer in mixers)
    assert attention == Parameters(
        total=4 * 24**2 + 4 * 24,
        matrices=4 * 24**2,
        biases=4 * 24,
        temperatures=0,
        prior=0,
        conditioner=0,
        conditioner_share=0,
    )
    # q, k at 24, v, lambda, g at 12, 12 back to 24: the same matrices; one temperature per value channel.
    assert plain.matrices == full.matrices == 4 * 24**2
    assert plain.biases == full.biases == 2 * 24 + 3 * 12 + 24
    assert plain.temperatures == full.temperatures == 12
    # Four channels: three maps into them with biases, one out of them to all projections.
    assert full.conditioner == 24 * 12 + 12 + 4 * (2 * 24 + 3 * 12)
    assert full.conditioner_share == pytest.approx(full.conditioner / full.total)
    assert plain.conditioner == 0


def test_the_command_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--dim", "24", "--heads", "3", "--lengths", "13", "--context", "512", "--decode-steps", "2"]
    rounds = ["--modes", "eager", "--rounds", "2", "--warmup", "1", "--threads", "1", "--targets", "--out"]
    assert bench.main(["layer", *size, *rounds, str(tmp_path)]) == 0
    written = json.loads((tmp_path / "layer.json").read_text())
    assert set(written) == {"benchmark", "settings", "environment", "layers", "decode"}
    assert written["settings"]["lengths"] == [13]
    assert written["environment"]["torch"] == torch.__version__
    assert written["environment"]["threads"] == 1
    assert [row["name"] for row in written["layers"]] == ["attention", "FEM softmax LTG", "FEM softmax CLTG"]
    for row in written["layers"]:
        for timing in (row["forward"], row["training"]):
            assert len(timing["samples"]) == 2
            assert 0 < timing["ratio"]["q1"] <= timing["ratio"]["median"] <= timing["ratio"]["q3"]
            assert timing["seconds"]["median"] > 0
        assert row["peak_ratio"] == row["peak_bytes"] / written["layers"][0]["peak_bytes"]
        assert row["peak_bytes"] > 4 * row["parameters"]["total"]  # the gradients at least
    decode = [(row["name"], row["cache"]) for row in written["decode"]]
    assert decode == [
        ("attention", None),
        *((f"FEM softmax {parts}", c) for parts in ("LTG", "CLTG") for c in ("value", "exp")),
    ]
    attention, value, exp, *_ = (row["state_ratio"] for row in written["decode"])
    # Besides keys and values FEM keeps one position per token, 8 bytes of attention's 192 here.
    assert (attention, value, exp) == pytest.approx((1, 0.75, 1), abs=0.06)
    assert written["decode"][0]["bytes_per_token"] == 2 * 24 * 4
    assert written["decode"][0]["state_bytes"] == 512 * 2 * 24 * 4
    shown = capsys.readouterr().out
    for text in ((tmp_path / "layer.md").read_text(), shown):
        assert "One layer, eager: 13 tokens, batch 2" in text
        assert "context 512, batch 1" in text
        assert "FEM softmax CLTG" in text
        assert "≤" not in text and ">" not in text  # no target is meant for this size


def test_an_encoder_is_measured_without_decoding(tmp_path: Path) -> None:
    report = run(replace(TINY, encoder=True, kv_heads=1, parts=("LTG",), out=tmp_path))
    assert report.decode == []
    assert [cost.name for cost in report.layers] == ["attention", "FEM softmax LTG"]


def test_a_layer_is_measured_beside_busy_processes(tmp_path: Path) -> None:
    report = run(replace(TINY, parts=("LTG",), busy=1, out=tmp_path))
    assert json.loads((tmp_path / "layer.json").read_text())["settings"]["busy"] == 1
    assert all(table.title.endswith(", beside 1 busy process") for table in tables(report, True))
    assert sequence_target(cost("softmax", "LTG", 1024), {**SOFTMAX_SIZE, "busy": 1}) == Target()


def test_peak_memory_of_a_layer_repeats_to_the_byte() -> None:
    for call in contestants(TINY, 13).values():
        call.train_and_clear()
        assert len({peak_memory(call.train_and_clear, CPU) for _ in range(2)}) == 1


def test_a_prior_has_its_options_after_a_colon() -> None:
    assert parse_prior("softmax") == ("softmax", {})
    assert parse_prior("softmax:window=5,rope=false,cache=exp,rope_base=2.5") == (
        "softmax",
        {"window": 5, "rope": False, "cache": "exp", "rope_base": 2.5},
    )
    assert canonical("softmax:rope=true,window=none,cache=value") == "softmax"
    assert (
        canonical("softmax:window=5,cache=exp")
        == canonical("softmax:cache=exp,window=5")
        == "softmax:cache=exp,window=5"
    )


def test_the_options_of_a_prior_reach_it() -> None:
    mixer = Mixer("softmax:window=5,rope=false,cache=exp", "LTG").build(TINY)
    assert isinstance(mixer, FreeEnergyMixer)
    assert (mixer.prior.window, mixer.prior.rope, mixer.prior.cache) == (5, False, "exp")


class Running(Prior):
    """A prior with a state of constant size: all earlier tokens alike."""

    queries_and_keys = False

    def __init__(self, *args: object, causal: bool, decay: str = "head", **factory_kwargs: object) -> None:
        super().__init__(*args, causal=causal, **factory_kwargs)  # type: ignore[arg-type]
        self.decay = torch.nn.Parameter(torch.zeros(5))

    def columns(self) -> dict[str, Columns]:
        return {"unused": Columns(1)}

    def read(
        self, inputs: dict[str, Tensor], v: Tensor, beta: Tensor | None, layout: Layout, state: object, keep: bool
    ) -> tuple[Tensor, Tensor | None, object]:
        before = 0 if state is None else state
        assert beta is not None
        sums = torch.stack([v, (beta * v).exp()]).cumsum(2) + before
        count = layout.position[..., None, None] + 1
        return sums[0] / count, (sums[1] / count).log() / beta, sums[:, :, -1:].clone()


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more priors in the registry, one of them with a name for which there are targets."""
    monkeypatch.setitem(PRIORS, "running", Running)
    monkeypatch.setitem(PRIORS, "gla", Running)


@pytest.mark.usefixtures("running")
def test_several_priors_and_lengths_are_one_run(tmp_path: Path) -> None:
    priors, parts = ("softmax", "running", "running:decay=channel"), ("LTG", "CLTG")
    options = replace(TINY, priors=priors, parts=parts, lengths=(13, 7), forward_lengths=(19,), out=tmp_path)
    report = run(options)
    rows = [("attention", None), *itertools.product(priors, parts)]
    assert [(c.length, c.prior, c.parts) for c in report.layers] == [(n, *row) for n in (13, 7, 19) for row in rows]
    assert {c.length for c in report.layers if c.training is None} == {19}
    assert {c.length for c in report.layers if c.training_flops is None} == {19}
    for cost in report.layers:
        assert cost.forward.ratio.median > 0 and cost.peak_bytes > 0 and cost.forward_flops > 0
        assert cost.parameters.prior == 5 * cost.prior.startswith("running")
        if cost.training is not None:
            assert cost.training.ratio.median > 0
    # The peak is of training where that is measured, and else of the forward pass.
    rival = Entry(Mixer(), "eager")
    train, forward = contestants(options, 13)[rival].train_and_clear, contestants(options, 19)[rival].forward
    peaks = [cost.peak_bytes for cost in report.layers if cost.prior == "attention"]
    assert [peaks[0], peaks[2]] == [peak_memory(train, CPU), peak_memory(forward, CPU)]
    titles = [table.title for table in tables(report, True)]
    assert [title.split(",")[1].split()[1] for title in titles[:-1]] == ["13", "7", "19"]
    *sequences, _ = tables(report, True)
    assert [len(table.header) for table in sequences] == [9, 9, 7]
    assert all(len(row) == len(table.header) for table in tables(report, True) for row in table.rows)
    assert all(table.notes == (FLOPS_NOTE,) for table in sequences)
    assert FLOPS_NOTE in (tmp_path / "layer.md").read_text()


@pytest.mark.usefixtures("running")
def test_a_constant_state_has_bytes_but_none_per_token(tmp_path: Path) -> None:
    report = run(replace(TINY, priors=("running", "softmax:cache=exp"), parts=("LTG",), out=tmp_path))
    attention, constant, cached = report.decode
    assert (constant.cache, cached.cache) == (None, "exp")
    # A sum of values and one of exponentials for each of 24 channels: 4 dim columns for v, lambda, g and the output.
    assert constant.state_bytes == 2 * 4 * 24
    assert constant.bytes_per_token is None
    assert constant.state_ratio == constant.state_bytes / attention.state_bytes
    assert attention.bytes_per_token == attention.state_bytes / 17
    *_, table = tables(report, False)
    assert [row[-1] for row in table.rows][:2] == ["192", "constant"]


def test_without_linear_time_priors_there_is_nothing_to_say_about_flops(tmp_path: Path) -> None:
    assert not any(table.notes for table in tables(run(replace(TINY, parts=("LTG",), out=tmp_path)), False))


def cost(prior: str, parts: str, length: int, mode: str = "eager") -> SequenceCost:
    timing, parameters = Timing.of([1.0], [1.0]), Parameters(4, 4, 0, 0, 0, 0, 0)
    return SequenceCost("", prior, parts, mode, length, parameters, 1, 1, timing, timing, 1, 1.0)


@pytest.mark.usefixtures("running")
def test_a_target_stands_only_beside_a_measurement_of_its_size() -> None:
    linear, softmax = LINEAR_TIME_SIZE, SOFTMAX_SIZE
    assert sequence_target(cost("gla", "CLTG", 1024), linear) == Target(0.85, 0.80)
    assert sequence_target(cost("gla:decay=head", "CLTG", 8192), linear) == Target(0.28)
    assert sequence_target(cost("gla:decay=channel", "CLTG", 1024), linear) == Target(1.5, 1.5)
    assert sequence_target(cost("softmax", "LTG", 1024, "compiled"), softmax) == Target(1.05, 1.10, 1.35)
    none = Target()
    assert sequence_target(cost("gla", "CLTG", 2048), linear) == none
    assert sequence_target(cost("gla", "LTG", 1024), linear) == none
    assert sequence_target(cost("gla", "CLTG", 1024, "compiled"), linear) == none
    assert sequence_target(cost("gla", "CLTG", 1024), softmax) == none
    assert sequence_target(cost("softmax", "LTG", 1024), linear) == none
    assert sequence_target(cost("softmax:window=5", "LTG", 1024), softmax) == none
    assert sequence_target(cost("running", "CLTG", 1024), linear) == none
    for name, other in (("batch", 1), ("dtype", "float64"), ("encoder", True), ("kv_heads", 2), ("device", "cuda")):
        assert sequence_target(cost("gla", "CLTG", 1024), {**linear, name: other}) == none


def test_targets_are_shown_at_their_size_and_when_asked_for(tmp_path: Path) -> None:
    report = run(replace(TINY, parts=("LTG",), out=tmp_path))
    # As if it had been measured at the size of the targets.
    layers = [replace(cost, length=1024) for cost in report.layers]
    report = replace(report, layers=layers, settings={**report.settings, **DECODE_SIZE, "lengths": (1024,)})
    sequence, decode = tables(report, True)
    assert sequence.rows[1][4].endswith(" 1.05") and sequence.rows[1][6].endswith(" 1.10")
    assert sequence.rows[1][8].endswith(" 1.35")
    assert [row[3][-4:] for row in decode.rows] == ["1", "1.60", "1.15"]
    sequence, decode = tables(report, False)
    assert not any(
        cell.endswith((" 1.05", " 1.60")) for table in (sequence, decode) for row in table.rows for cell in row
    )
