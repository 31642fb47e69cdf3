"""What benchmarks measure: rounds, ratios, bytes and FLOPs agree with numbers worked out by hand."""

import itertools
import json
import os
import re
import signal
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from started import Started
from torch import Tensor

from femixer import bench
from femixer.baselines import BASELINES
from femixer.bench.calls import Call, flops, held_bytes, highest_sum, peak_memory
from femixer.bench.contestants import Mixer
from femixer.bench.layer import Options, Report, contestants, counted
from femixer.bench.measure import Spread, busy, paired_ratio, race, ratio_cell, unlimited_compilation
from femixer.priors import PRIORS
from femixer.reporting import as_csv, as_html, as_latex, as_markdown
from femixer.state import Growing

CPU = torch.device("cpu")
TINY = Options(dim=24, heads=3, batch=2, modes=("eager",), threads=1)


def test_paired_ratio_cancels_what_slows_a_round_down() -> None:
    reference = [1.0, 10.0, 2.0, 100.0, 4.0]
    times = [1.1, 12.0, 2.6, 140.0, 6.0]  # ratios 1.1, 1.2, 1.3, 1.4, 1.5
    ratio = paired_ratio(times, reference)
    assert (ratio.q1, ratio.median, ratio.q3) == pytest.approx((1.2, 1.3, 1.4))
    assert paired_ratio([3.0], [2.0]) == Spread(1.5, 1.5, 1.5)


def test_a_round_samples_every_contestant_once_in_changing_order() -> None:
    calls: list[str] = []
    rounds = 20

    def sample(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    names = "abc"
    seconds = race({name: lambda name=name: sample(name) for name in names}, rounds, warmup=2)  # type: ignore[misc]
    orders = ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert len(orders) == rounds + 2
    assert all(sorted(order) == list(names) for order in orders)
    assert len(set(orders)) > 3
    # The samples of the warm-up are gone, the others are in the order of the rounds.
    assert sorted(itertools.chain(*seconds.values())) == list(range(7, 3 * rounds + 7))
    assert all(times == sorted(times) for times in seconds.values())


def test_peak_memory_is_right_to_the_byte() -> None:
    x = torch.randn(1000)

    def freed_in_order() -> Tensor:
        y = x + x  # 4000 bytes
        z = y * x  # 8000
        del y  # 4000
        return torch.cat([z, z])  # 12000

    assert peak_memory(freed_in_order, CPU) == 12000
    assert peak_memory(lambda: x.add_(x), CPU) == 0


def test_peak_memory_counts_what_an_operator_allocates_inside() -> None:
    @torch.library.custom_op("femixer_test::hungry", mutates_args=())
    def hungry(x: Tensor) -> Tensor:
        return torch.cat([x, x, x])[: len(x)].clone()  # 12000 bytes inside, 4000 of them leave

    assert peak_memory(lambda: hungry(torch.zeros(1000)), CPU) == 4000 + 12000 + 4000


def test_releases_of_older_memory_do_not_lower_the_peak() -> None:
    assert highest_sum([(1, 5), (9, -100), (2, 7), (1, -5), (1, 3), (2, -7)]) == 12


def test_held_bytes_counts_what_is_filled() -> None:
    with torch.no_grad():
        growing = Growing.of(torch.zeros(2, 3, 5, 7)).append(torch.zeros(2, 3, 1, 7))
    assert held_bytes((growing, {"a": torch.zeros(11, dtype=torch.float64)}, None, 4)) == 4 * 2 * 3 * 6 * 7 + 88


def flops_of(options: Options, length: int) -> dict[str | None, tuple[int, int]]:
    """By parts: forward, and forward and backward."""
    field = contestants(options, length)
    return {e.mixer.parts: (flops(call.forward), flops(call.train_and_clear)) for e, call in field.items()}


def test_flops_are_those_worked_out_by_hand() -> None:
    tokens, pairs = 2 * 67, 2 * 67 * 67
    projections, attention = 2 * tokens * 4 * 24**2, 2 * 2 * pairs * 24
    found = flops_of(replace(TINY, parts=("", "LTG", "CLTG")), 67)
    # The backward pass has two products for each of the forward; attention computes its scores once more.
    assert found[None] == (projections + attention, 3 * projections + attention * 7 // 2)
    # [v, exp(beta v)] is as wide as attention's values.
    assert found[""] == found["LTG"] == found[None]
    # The conditioner projects to three times four channels, and from four to all projections.
    conditioner = 2 * tokens * (24 * 3 * 4 + 4 * (2 * 24 + 3 * 12))
    assert found["CLTG"][0] == found["LTG"][0] + conditioner


PRIOR_NAMES = (*PRIORS, "gla:decay=channel", "mamba:normalize=false")


@pytest.mark.parametrize("length", [1, 32])
@pytest.mark.parametrize("prior", PRIOR_NAMES)
def test_flops_depend_on_shapes_only_and_no_compiled_kernel_hides_any(prior: str, length: int) -> None:
    options = replace(TINY, priors=(prior,), parts=("CLTG",))
    attention, fem = counted(options, length, training=True).values()
    by_data = flops_of(options, length)
    assert by_data[None] == attention[1:]
    if prior == "fox":
        # Off the CPU one more channel of keys takes the gradient of the decays.
        assert by_data["CLTG"][0] == fem[1] and by_data["CLTG"][1] <= fem[2] < 1.2 * by_data["CLTG"][1]
    else:
        assert by_data["CLTG"] == fem[1:]
    # At least the four matrices and the conditioner's two products with every token.
    own = fem.parameters.matrices + fem.parameters.conditioner
    assert fem.forward_flops >= 0.9 * 2 * 2 * length * own
    assert fem.training_flops is not None and fem.training_flops > 2.9 * fem.forward_flops


def test_fem_with_softmax_never_counts_fewer_flops_than_attention() -> None:
    for length in (2, 7, 32, 131):
        attention, plain, full = counted(replace(TINY, parts=("LTG", "CLTG")), length, training=False).values()
        assert attention.forward_flops <= plain.forward_flops < full.forward_flops


@pytest.mark.parametrize("encoder", [False, True])
def test_grouped_heads_count_as_if_each_query_had_its_own_key(encoder: bool) -> None:
    options = replace(TINY, kv_heads=1, encoder=encoder, parts=("LTG",))
    attention, fem = counted(options, 13, training=True).values()
    assert flops_of(options, 13) == {None: attention[1:], "LTG": fem[1:]}
    matrices, pairs = 2 * 2 * 13 * attention.parameters.matrices, 2 * 13 * 13
    assert attention.forward_flops == matrices + 2 * 2 * pairs * 24


@pytest.mark.parametrize("name", BASELINES)
def test_flops_of_every_rival_are_counted_from_shapes(name: str) -> None:
    counts = []
    for device in ("cpu", "meta"):
        layer, x = BASELINES[name](24, 2, device=device), torch.randn(2, 13, 24, device=device)
        call = Call(layer, layer, x.requires_grad_(), torch.randn(2, 13, 24, device=device))
        counts.append((flops(call.forward), flops(call.train_and_clear)))
    # Heads are padded, on a CPU to the wider of keys and values, elsewhere to multiples of eight.
    assert counts[0] == counts[1] or name in ("laser", "fox")
    assert counts[1][0] >= 2 * 2 * 13 * 3 * 24**2


def test_counting_takes_no_memory_and_no_time() -> None:
    """Half a million tokens: attention would need terabytes for its scores."""
    attention, fem = counted(replace(TINY, parts=("CLTG",)), 2**19, training=True).values()
    assert fem.forward_flops > attention.forward_flops > 4 * 2 * 24 * 2**38


def seconds_of(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_busy_machine_has_processes_that_compute_until_the_end() -> None:
    with busy(2) as pids:
        before = [seconds_of(pid) for pid in pids]
        deadline = time.monotonic() + 60
        while not all(seconds_of(pid) > start for pid, start in zip(pids, before, strict=True)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert len(pids) == 2 and not any(map(is_running, pids))
    with busy(0) as none:
        assert none == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_busy_processes_end_with_an_error(error: type[BaseException]) -> None:
    with pytest.raises(error), busy(1) as pids:
        raise error
    assert not any(map(is_running, pids))


def test_a_busy_process_that_ends_early_is_an_error() -> None:
    def kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)

    with pytest.raises(RuntimeError, match="1 of 1 processes beside the measurement ended early"), busy(1) as pids:
        kill(pids[0])


def be_busy(told: Path) -> None:
    with busy(1) as pids:
        told.with_suffix(".partial").write_text(str(pids[0]))
        told.with_suffix(".partial").rename(told)
        time.sleep(60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_busy_processes_end_with_the_command(tmp_path: Path, number: signal.Signals) -> None:
    command = Started(be_busy, tmp_path / "pid")
    while not (tmp_path / "pid").exists():
        assert command.is_alive, command.end()
        time.sleep(0.02)
    pid = int((tmp_path / "pid").read_text())
    command.send(number)
    command.end(60)
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_ratio_says_whether_it_keeps_its_target() -> None:
    assert ratio_cell(Spread(1.2, 1.1, 1.3)) == "1.200 [1.100–1.300]"
    assert ratio_cell(Spread(1.2, 1.1, 1.3), 1.2) == "1.200 [1.100–1.300] ≤ 1.20"
    assert ratio_cell(1.21, 1.2) == "1.210 > 1.20"


def test_compiled_layers_do_not_run_out_of_versions() -> None:
    from torch._dynamo import config

    before = config.recompile_limit
    with unlimited_compilation(True):
        assert config.recompile_limit > 100
    assert config.recompile_limit == before
    assert (
        ratio_cell(0.9, 0.9, at_least=True) == "0.900 ≥ 0.90" and ratio_cell(0.8, 0.9, at_least=True) == "0.800 < 0.90"
    )


RESULTS = Path(__file__).parent.parent / "benchmarks"
STORED = [path for path in sorted(RESULTS.glob("*.json")) if "benchmark" in json.loads(path.read_text())]


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_results_make_their_tables(path: Path, tmp_path: Path) -> None:
    content = json.loads(path.read_text())
    place, _, name = bench.BENCHES[content["benchmark"]][0].partition(":")
    module = import_module(place)
    report, tables = module.Report.read(path), getattr(module, f"{name}_tables" if name else "tables")
    without_targets = content["benchmark"] == "speed"
    made = [*(tables(report) if without_targets else tables(report, True))]
    text = as_markdown(*made)
    assert as_latex(*made).count(r"\begin{tabular}") == as_html(*made).count("<table>") == len(made)
    assert as_csv(*made).count("\n") == 1 + sum(len(table.rows) for table in made)
    assert text.count("\n| ") >= 4  # title, rule, the rival and FEM
    shown = not (without_targets or content["settings"].get("busy"))  # on a busy machine is no target
    assert ("≤" in text or "≥" in text) == shown
    report.save(tmp_path / f"{content['benchmark']}.json")
    assert json.loads((tmp_path / f"{content['benchmark']}.json").read_text()) == content


@pytest.mark.parametrize("name", ["layer", "linear-time"])
def test_stored_flops_are_those_that_are_counted_now(name: str) -> None:
    report = Report.read(RESULTS / f"{name}.json")
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in report.settings.items()}
    options = Options(**given)
    for length in (*options.lengths, *options.forward_lengths):
        counts = counted(options, length, length in options.lengths)
        for cost in (cost for cost in report.layers if cost.length == length):
            found = counts[Mixer(cost.prior, cost.parts)]
            assert found == (cost.parameters, cost.forward_flops, cost.training_flops), cost.name


def test_there_are_stored_results_of_every_benchmark() -> None:
    found = {json.loads(path.read_text())["benchmark"] for path in STORED}
    assert {"layer", "scaling", "lm", "vision", "forecast"} <= found


def test_the_example_of_the_documentation_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    text = (RESULTS.parent / "docs" / "bench.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(RESULTS.parent)
    exec(code, {})
    assert r"\begin{tabular}" in capsys.readouterr().out
