"""Properties of `femixer bench speed`: rows, ratios, figures of the paper, going on, and FLOPs that hide no kernel."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from femixer import bench
from femixer.bench import speed
from femixer.bench.calls import peak_memory
from femixer.bench.speed import LATENCY, NAIVE, PAPER, RIVAL, ROWS, Options, counted, read, run, tables
from femixer.models.named import NAMED

TINY = Options(layers=1, dim=24, heads=2, tokens=13, batch=1, rounds=2, warmup=0, threads=1)


def test_rows_stand_beside_the_paper_and_finished_ones_are_kept(tmp_path: Path) -> None:
    options = replace(TINY, table="gpt2", rows=("FEM-Mamba",), out=tmp_path)
    first = run(options).costs["FEM-Mamba"]
    report = run(replace(options, rows=("LASER", "FEM-Mamba")))
    assert [*report.costs] == [RIVAL, "FEM-Mamba", "LASER"]  # the paper's order, others behind
    assert report.costs["FEM-Mamba"].forward.samples == first.forward.samples
    cost, rival = report.costs["FEM-Mamba"], report.costs[RIVAL]
    assert cost.forward.ratio.median != 1 and rival.training.ratio.median == 1
    assert cost.training_peak > 4 * cost.parameters and cost.training_flops > 2 * cost.forward_flops
    time, memory, count = ({row[0]: row for row in table.rows} for table in tables(report))
    assert time["FEM-Mamba"][4] == f"{0.0647 / 0.0649:.3f}" and time["FEM-Mamba"][8] == f"{0.1831 / 0.1471:.3f}"
    assert memory["FEM-Mamba"][3] == f"{7.97 / 4.89:.3f}" and count["FEM-Mamba"][3] == f"{150.44 / 169.89:.3f}"
    assert memory["FEM-Mamba"][2] == f"{cost.forward_peak / rival.forward_peak:.3f}"
    assert time["LASER"][4] == "" and time[RIVAL][3] == "1"
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".tex", ".csv", ".png"}
    with pytest.raises(ValueError, match="tokens was 13 and is now 7"):
        run(replace(options, tokens=7))
    speed.Report.read(options.path).save(tmp_path / "speed-again.json")
    assert json.loads((tmp_path / "speed-again.json").read_text()) == json.loads(options.path.read_text())


def test_naive_attention_is_attention_with_all_weights_in_memory() -> None:
    options = replace(TINY, tokens=67)
    fused, naive = (speed.call_of(row, options) for row in (RIVAL, NAIVE))
    naive.layer.load_state_dict(fused.layer.state_dict())
    torch.testing.assert_close(naive.function(fused.x), fused.forward())
    assert peak_memory(naive.train_and_clear, naive.x.device) > 4 * 67**2 + peak_memory(
        fused.train_and_clear, fused.x.device
    )


@pytest.mark.parametrize("table", PAPER)
def test_every_row_of_the_paper_has_a_model_or_says_why_not(table: str) -> None:
    options = replace(TINY, table=table)
    for row in PAPER[table]:
        if row == "PaTH" and "PaTH" not in NAMED:
            with pytest.raises(ValueError, match="mixer='path' is unknown; choose one of fem, attention"):
                speed.call_of(row, options, device="meta")
        else:
            speed.call_of(row, options, device="meta")


def test_a_missing_rival_leaves_out_its_row_but_is_an_error_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ROWS, "Missing", {"mixer": "missing"})
    monkeypatch.setitem(PAPER, "latency", {RIVAL: LATENCY[RIVAL], "Missing": LATENCY["HGRN2"]})
    report = run(replace(TINY, out=tmp_path))
    assert "Missing is left out: mixer='missing' is unknown" in capsys.readouterr().err
    assert [*tables(report)][-1].notes[-1] == "Not measured: Missing."
    with pytest.raises(ValueError, match="mixer='missing' is unknown"):
        run(replace(TINY, rows=("Missing",), out=tmp_path))


def test_the_table_and_quick_give_the_defaults() -> None:
    assert read(["--table", "gpt2", "--precision", "bfloat16"]) == Options(
        table="gpt2", layers=12, dim=768, heads=12, tokens=1024, batch=8, dtype="bfloat16"
    )
    quick = read(["--quick", "--layers", "3"])
    assert (quick.layers, quick.tokens, quick.batch, quick.rounds) == (3, 1024, 1, 5)


def test_an_unknown_table_is_told_the_two_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main(["speed", "--table", "gpt3"])
    assert stop.value.code == 2 and "latency" in (told := capsys.readouterr().err) and "gpt2" in told


LADDER = ("SMAttn+L,T,G", "FEM-SM")


@pytest.mark.parametrize("tokens", [2, 67])
def test_fem_never_counts_fewer_flops_than_attention_of_the_same_shapes(tokens: int) -> None:
    options = replace(TINY, tokens=tokens, dim=32)  # [v, exp(beta v)] as wide as a head: attention's products
    rival, *ours = (counted(row, options) for row in (RIVAL, *LADDER))
    for one, more in zip((rival, *ours), ours, strict=False):
        assert one["forward_flops"] < more["forward_flops"] and one["training_flops"] < more["training_flops"]


@pytest.mark.parametrize("row", ["FEM-AFT", "FEM-GLA"])
def test_flops_of_linear_time_rows_grow_linearly(row: str) -> None:
    once, twice = (counted(row, replace(TINY, tokens=tokens)) for tokens in (128, 256))
    for step, flops in once.items():
        assert twice[step] == pytest.approx(2 * flops, rel=0.02)


def test_flops_of_attention_grow_faster() -> None:
    once, twice = (counted(RIVAL, replace(TINY, tokens=tokens))["forward_flops"] for tokens in (128, 256))
    assert twice > 2.4 * once
