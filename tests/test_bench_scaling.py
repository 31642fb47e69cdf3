"""Properties of the scaling benchmark: every point is measured once, kept, and compared with the right one."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_bench_layer import Running

from femixer import bench
from femixer.bench import scaling as command
from femixer.bench.calls import Decoder
from femixer.bench.contestants import Mixer
from femixer.bench.scaling import (
    DecodePoint,
    Options,
    Report,
    SequencePoint,
    draw,
    measure_sequences,
    state_grows,
    tables,
)
from femixer.priors import PRIORS

TINY = Options(
    dim=24,
    heads=3,
    lengths=(8, 16, 32),
    positions=(3, 10, 100000),
    quadratic_limit=16,
    decode_steps=2,
    rounds=2,
    warmup=0,
    threads=1,
    parts="LTG",
    priors=("attention", "softmax", "running"),
)


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prior with a state of constant size, and a shorter sample."""
    monkeypatch.setitem(PRIORS, "running", Running)
    monkeypatch.setattr("femixer.bench.scaling.TOKENS_PER_SAMPLE", 32)


def points(report: Report) -> tuple[list[tuple[str, str, int]], list[tuple[str, int]]]:
    return [(p.mixer, p.step, p.length) for p in report.sequences], [(p.mixer, p.position) for p in report.decode]


def test_all_registered_priors_and_attention_are_measured_by_default() -> None:
    assert Options().priors[0] == "attention"
    assert set(PRIORS) - {"running"} == set(Options().priors[1:])
    assert Options().lengths == (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def test_mixers_that_keep_every_token_stop_at_the_limit(tmp_path: Path) -> None:
    sequences, decode = points(command.run(replace(TINY, out=tmp_path)))
    limited, free = [8, 16], [8, 16, 32]
    assert sequences == [
        *(("attention", "forward", n) for n in limited),
        *(("softmax", "forward", n) for n in limited),
        *(("running", "forward", n) for n in free),
    ]
    # What a cache cannot reach is measured at the limit instead, once.
    limited, free = [3, 10, 16], [3, 10, 100000]
    assert decode == [
        *(("attention", n) for n in limited),
        *(("softmax", n) for n in limited),
        *(("running", n) for n in free),
    ]


def test_a_growing_state_is_told_from_a_constant_one() -> None:
    assert [state_grows(mixer, TINY) for mixer in TINY.mixers] == [True, True, False]


def test_a_far_position_is_reached_without_running_there() -> None:
    layer = Mixer("running", "LTG").build(TINY)
    decoder = Decoder.after(layer, 5, 1, TINY).at(100000)
    assert decoder.state.past.seen == 100000
    with torch.inference_mode():
        _, state = layer(decoder.tokens[0], state=decoder.state, return_state=True)
    assert state.past.seen == 100001
    assert decoder.time() > 0
    assert decoder.state.past.seen == 100000  # every sample starts there


def test_peak_memory_of_a_pass_is_that_of_its_tensors() -> None:
    """Everything that running averages allocate is proportional to the length, and training holds gradients too."""
    mixer = Mixer("running", "LTG")
    forward, training = (
        {p.length: p.peak_bytes for p in measure_sequences(mixer, step, (64, 128), False, TINY)}
        for step in ("forward", "training")
    )
    assert forward[128] == pytest.approx(2 * forward[64], rel=0.02)
    assert forward[64] >= 4 * 64 * 24  # its output at least
    weights = 4 * sum(parameter.numel() for parameter in mixer.build(TINY).parameters())
    assert training[64] > weights
    assert training[128] - weights == pytest.approx(2 * (training[64] - weights), rel=0.05)


def test_the_command_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--dim", "24", "--heads", "3", "--lengths", "8", "16", "--positions", "3", "9", "--decode-steps", "2"]
    rounds = ["--rounds", "2", "--warmup", "0", "--threads", "1", "--training", "--targets"]
    priors = ["--priors", "attention", "softmax", "running", "running:decay=channel", "--parts", "LTG"]
    assert bench.main(["scaling", *size, *rounds, *priors, "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scaling.json", "scaling.md", "scaling.png"]
    written = json.loads((tmp_path / "scaling.json").read_text())
    assert set(written) == {"benchmark", "settings", "environment", "sequences", "decode"}
    assert len(written["sequences"]) == 4 * 2 * 2 and len(written["decode"]) == 4 * 2
    assert all(len(p["samples"]) == 2 and min(p["samples"]) > 0 for p in written["sequences"] + written["decode"])
    assert all(p["peak_bytes"] > 0 for p in written["sequences"])
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    shown, text = " ".join(capsys.readouterr().out.split()), (tmp_path / "scaling.md").read_text()
    for part in ("batch 1, dim 24, 3 heads, parts LTG", "FEM running:decay=channel", "8 to 16", "Tokens per second"):
        assert part in shown and part in text


def test_what_is_there_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, Sequence[int]]] = []
    for name in ("measure_sequences", "measure_decode"):
        true = getattr(command, name)

        def spy(mixer: Mixer, *args: object, true: object = true, name: str = name) -> object:
            measured.append((mixer.prior, args[0 if name == "measure_decode" else 1]))  # type: ignore[arg-type]
            return true(mixer, *args)  # type: ignore[operator]

        monkeypatch.setattr(command, name, spy)
    options = replace(TINY, priors=("running",), out=tmp_path)
    first = command.run(options)
    assert measured == [("running", [8, 16, 32]), ("running", [3, 10, 100000])]
    measured.clear()
    assert command.run(options) == first
    assert measured == []
    more = command.run(replace(options, priors=("softmax", "running"), lengths=(8, 16, 64), positions=(3,)))
    assert measured == [("softmax", [8, 16]), ("softmax", [3]), ("running", [64])]
    assert more.mixers == ["running", "softmax"]
    assert list(more.sequence("running", "forward")) == [8, 16, 32, 64]
    measured.clear()
    anew = command.run(replace(options, overwrite=True))
    assert len(measured) == 2
    assert points(anew) == points(first)
    assert anew != first


def test_a_run_that_breaks_off_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = command.measure_decode

    def breaks(mixer: Mixer, *args: object) -> object:
        if mixer.prior == "softmax":
            raise KeyboardInterrupt
        return true(mixer, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "measure_decode", breaks)
    with pytest.raises(KeyboardInterrupt):
        command.run(replace(TINY, out=tmp_path))
    kept = json.loads((tmp_path / "scaling.json").read_text())
    assert {p["mixer"] for p in kept["sequences"]} == {"attention", "softmax"}
    assert {p["mixer"] for p in kept["decode"]} == {"attention"}
    monkeypatch.setattr(command, "measure_decode", true)
    report = command.run(replace(TINY, out=tmp_path))
    assert [p.samples for p in report.sequences[:4]] == [p["samples"] for p in kept["sequences"]]
    assert report.mixers == list(TINY.priors)
    # A whole measurement stays until the one that overwrites it is whole, too.
    file, options = tmp_path / "scaling.json", replace(TINY, priors=("attention", "softmax"), out=tmp_path)
    whole = file.read_text()
    monkeypatch.setattr(command, "measure_decode", breaks)
    with pytest.raises(KeyboardInterrupt):
        command.run(replace(options, overwrite=True))
    assert file.read_text() == whole
    begun = json.loads((tmp_path / "scaling.new.json").read_text())
    monkeypatch.setattr(command, "measure_decode", true)
    report = command.run(options)
    assert [p.samples for p in report.sequences] == [p["samples"] for p in begun["sequences"]]
    assert command.Report.read(file) == report and not (tmp_path / "scaling.new.json").exists()


def test_an_interrupted_command_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", interrupted)
    assert bench.main(["scaling", "--out", str(tmp_path)]) == 130
    assert "the same command without --overwrite goes on" in capsys.readouterr().err


def test_points_of_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    options = replace(TINY, priors=("running",), out=tmp_path)
    command.run(options)
    kept = (tmp_path / "scaling.json").read_text()
    with pytest.raises(ValueError, match=r"heads was 3 and is now 6.*--overwrite"):
        command.run(replace(options, heads=6))
    with pytest.raises(ValueError, match="threads was 1 and is now 2"):
        command.run(replace(options, threads=2))
    assert (tmp_path / "scaling.json").read_text() == kept
    (tmp_path / "scaling.json").write_text("{")
    with pytest.raises(ValueError, match=r"scaling\.json that cannot be read"):
        command.run(options)
    command.run(replace(options, overwrite=True))


def report(lengths: Sequence[int], grows: bool = False, batch: int = 1) -> Report:
    """A mixer whose time per token is its length in units, and whose memory is 10 bytes per token."""
    sequences = [SequencePoint("gla", "forward", n, grows, 10 * n, [n * 1e-9, n * 2e-9]) for n in lengths]
    decode = [DecodePoint("gla", n, grows, [n * 1e-3]) for n in (2, 10)]
    settings = {"dim": 24, "heads": 3, "kv_heads": None, "batch": batch, "parts": "LTG", "dtype": "float32"}
    return Report(settings, {"threads": 1, "torch": "2"}, sequences, decode)


def growth_rows(given: Report, targets: bool = True) -> list[Sequence[str]]:
    return [row for table in tables(given, targets) if table.title.startswith("Growth") for row in table.rows]


def test_growth_is_from_4096_tokens_to_the_longest() -> None:
    sequence, decode = growth_rows(report([512, 4096, 65536]))
    assert sequence == ["FEM gla", "4096 to 65536", "16.000 [16.000–16.000] > 1.30", "1.000"]
    assert decode == ["FEM gla", "2 to 10", "5.000 [5.000–5.000]"]
    assert growth_rows(report([512, 1024]))[0][1:3] == ["512 to 1024", "2.000 [2.000–2.000]"]
    assert growth_rows(report([2048, 4096]))[0][1:3] == ["2048 to 4096", "2.000 [2.000–2.000]"]


def test_the_target_of_growth_is_for_its_lengths_and_one_sequence_in_linear_time() -> None:
    lengths = [4096, 65536]
    others = [report([4096, 32768]), report([2048, 65536]), report(lengths, grows=True), report(lengths, batch=2)]
    for other in others:
        assert ">" not in growth_rows(other)[0][2]
    assert ">" not in growth_rows(report(lengths), targets=False)[0][2]


def test_a_point_that_was_not_measured_is_an_empty_cell() -> None:
    given = report([8, 16])
    given.sequences.append(SequencePoint("attention", "forward", 8, True, 80, [1e-6]))
    time, *_ = tables(given, False)
    assert time.header == ["tokens:", "8", "16"]
    assert time.rows == [["FEM gla", "0.01", "0.02"], ["attention", "1.00", ""]]


def test_the_figure_has_a_line_per_mixer_in_every_panel() -> None:
    given = report([512, 4096])
    given.sequences.append(SequencePoint("attention", "forward", 512, True, 80, [1e-6]))
    given.decode.append(DecodePoint("attention", 3, True, [1e-3]))
    time, memory, decode = draw(given).axes
    for axes in (time, memory, decode):
        assert [line.get_label() for line in axes.lines] == ["FEM gla", "attention"]
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert list(memory.lines[0].get_xdata()) == [512, 4096]
    assert list(memory.lines[0].get_ydata()) == pytest.approx([5120e-6, 40960e-6])
    assert list(decode.lines[0].get_ydata()) == pytest.approx([500, 100])
