"""Properties of the benchmark: what it counts agrees with numbers worked out by hand, and the rival is attention."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from femixer import FreeEnergyMixer
from femixer.baselines import Attention
from femixer.bench import cli, layer, measure
from femixer.bench.table import Table
from femixer.state import Growing

CPU = torch.device("cpu")
TINY = layer.Options(
    dim=24, heads=3, length=13, batch=2, modes=("eager",), context=17, decode_steps=2, rounds=2, warmup=1, threads=1
)


def attention_and_mixer(**options: object) -> tuple[Attention, FreeEnergyMixer]:
    """Attention and FEM without parts, with the same weights."""
    attention, mixer = Attention(24, 6, **options), FreeEnergyMixer(24, 6, parts="", **options)  # type: ignore[arg-type]
    torch.manual_seed(3)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    mixer.prior_proj.linear.load_state_dict(attention.query_key_proj.state_dict())
    mixer.value_proj.linear.load_state_dict(attention.value_proj.state_dict())
    mixer.out_proj.load_state_dict(attention.out_proj.state_dict())
    return attention, mixer


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rope", [True, False])
def test_attention_is_the_mixer_without_parts(kv_heads: int, causal: bool, rope: bool) -> None:
    attention, mixer = attention_and_mixer(kv_heads=kv_heads, causal=causal, rope=rope)
    x = torch.randn(3, 13, 24)
    torch.testing.assert_close(attention(x), mixer(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("grad", [True, False])
def test_attention_in_chunks_is_attention_at_once(kv_heads: int, grad: bool) -> None:
    attention, _ = attention_and_mixer(kv_heads=kv_heads)
    x = torch.randn(3, 13, 24)
    with torch.set_grad_enabled(grad):
        state, chunks = None, []
        for piece in x.split([5, 1, 1, 4, 2], 1):
            y, state = attention(piece, state=state, return_state=True)
            chunks.append(y)
        torch.testing.assert_close(torch.cat(chunks, 1), attention(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_attention_runs_in_every_number_format(dtype: torch.dtype) -> None:
    attention, _ = attention_and_mixer()
    x = torch.randn(3, 13, 24)
    expected = attention(x)
    y = attention.to(dtype)(x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.05)


def test_attention_continues_twice_from_one_state() -> None:
    attention, _ = attention_and_mixer()
    x = torch.randn(3, 13, 24)
    with torch.inference_mode():
        _, state = attention(x[:, :11], return_state=True)
        _, state = attention(x[:, 11:12], state=state, return_state=True)
        first, _ = attention(x[:, 12:], state=state, return_state=True)
        attention(torch.randn(3, 1, 24), state=state, return_state=True)
        second, _ = attention(x[:, 12:], state=state, return_state=True)
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"dim": 25}, "dim=25"), ({"kv_heads": 4}, "kv_heads=4"), ({"heads": 0}, "heads=0"), ({"dim": 18}, "dim=18")],
)
def test_attention_names_a_wrong_argument(options: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Attention(**{"dim": 24, "heads": 6, **options})


def test_paired_ratio_cancels_what_slows_a_round_down() -> None:
    reference = [1.0, 10.0, 2.0, 100.0, 4.0]
    times = [1.1, 12.0, 2.6, 140.0, 6.0]  # ratios 1.1, 1.2, 1.3, 1.4, 1.5
    ratio = measure.paired_ratio(times, reference)
    assert (ratio.q1, ratio.median, ratio.q3) == pytest.approx((1.2, 1.3, 1.4))
    assert measure.paired_ratio([3.0], [2.0]) == measure.Spread(1.5, 1.5, 1.5)


def test_a_round_samples_every_contestant_once_in_changing_order() -> None:
    calls: list[str] = []
    rounds = 20

    def sample(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    names = "abc"
    seconds = measure.race({name: lambda name=name: sample(name) for name in names}, rounds, warmup=2)  # type: ignore[misc]
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

    assert measure.peak_memory(freed_in_order, CPU) == 12000
    assert measure.peak_memory(lambda: x.add_(x), CPU) == 0


def test_peak_memory_counts_what_an_operator_allocates_inside() -> None:
    @torch.library.custom_op("femixer_test::hungry", mutates_args=())
    def hungry(x: Tensor) -> Tensor:
        return torch.cat([x, x, x])[: len(x)].clone()  # 12000 bytes inside, 4000 of them leave

    assert measure.peak_memory(lambda: hungry(torch.zeros(1000)), CPU) == 4000 + 12000 + 4000


def test_releases_of_older_memory_do_not_lower_the_peak() -> None:
    assert measure.highest_sum([(1, 5), (9, -100), (2, 7), (1, -5), (1, 3), (2, -7)]) == 12


def test_held_bytes_counts_what_is_filled() -> None:
    with torch.no_grad():
        growing = Growing.of(torch.zeros(2, 3, 5, 7)).append(torch.zeros(2, 3, 1, 7))
    assert measure.held_bytes((growing, {"a": torch.zeros(11, dtype=torch.float64)}, None, 4)) == 4 * 2 * 3 * 6 * 7 + 88


def test_parameters_are_those_worked_out_by_hand() -> None:
    attention, plain, full = (layer.count_parameters(TINY, parts) for parts in (None, "LTG", "CLTG"))
    assert attention == layer.Parameters(
        total=4 * 24**2 + 4 * 24, matrices=4 * 24**2, biases=4 * 24, temperatures=0, conditioner=0, conditioner_share=0
    )
    # q, k at 24, v, lambda, g at 12, 12 back to 24: the same matrices; one temperature per value channel.
    assert plain.matrices == full.matrices == 4 * 24**2
    assert plain.biases == full.biases == 2 * 24 + 3 * 12 + 24
    assert plain.temperatures == full.temperatures == 12
    # Four channels: three maps into them with biases, one out of them to all projections.
    assert full.conditioner == 24 * 12 + 12 + 4 * (2 * 24 + 3 * 12)
    assert full.conditioner_share == pytest.approx(full.conditioner / full.total)
    assert plain.conditioner == 0


def test_flops_are_those_worked_out_by_hand() -> None:
    tokens, pairs = 2 * 13, 2 * 13 * 13
    projections, attention = 2 * tokens * 4 * 24**2, 2 * 2 * pairs * 24
    found = layer.contestants(replace(TINY, parts=("", "LTG", "CLTG")))
    forward = {c.parts: measure.flops(c.forward) for c in found.values()}
    assert forward[None] == forward[""] == projections + attention
    # [v, exp(beta v)] is as wide as attention's values, inside femixer's own operator.
    assert forward["LTG"] == projections + attention
    assert forward["CLTG"] == forward["LTG"] + 2 * tokens * (24 * 12 + 4 * (2 * 24 + 3 * 12))
    rival = found[f"eager {layer.ATTENTION}"]
    # The backward pass has two products for each of the forward; attention computes its scores once more.
    assert measure.flops(rival.train_and_clear) == 3 * projections + attention * 7 // 2


def test_the_command_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--dim", "24", "--heads", "3", "--length", "13", "--context", "512", "--decode-steps", "2"]
    run = ["--modes", "eager", "--rounds", "2", "--warmup", "1", "--threads", "1", "--targets", "--out"]
    assert cli.main(["layer", *size, *run, str(tmp_path)]) == 0
    written = json.loads((tmp_path / "layer.json").read_text())
    assert set(written) == {"benchmark", "settings", "environment", "layers", "decode"}
    assert written["settings"]["length"] == 13
    assert written["environment"]["torch"] == torch.__version__
    assert written["environment"]["threads"] == 1
    assert [row["name"] for row in written["layers"]] == ["attention", "FEM LTG", "FEM CLTG"]
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
        *((f"FEM {parts}", c) for parts in ("LTG", "CLTG") for c in ("value", "exp")),
    ]
    attention, value, exp, *_ = (row["cache_ratio"] for row in written["decode"])
    # Besides keys and values FEM keeps one position per token, 8 bytes of attention's 192 here.
    assert (attention, value, exp) == pytest.approx((1, 0.75, 1), abs=0.06)
    assert written["decode"][0]["cache_bytes_per_token"] == 2 * 24 * 4
    shown = capsys.readouterr().out
    for text in ((tmp_path / "layer.md").read_text(), shown):
        assert "One layer, eager: 13 tokens, batch 2" in text
        assert "context 512, batch 1" in text
        assert "FEM CLTG" in text
    assert "1.35" in shown  # a target


def test_an_encoder_is_measured_without_decoding(tmp_path: Path) -> None:
    report = layer.run(replace(TINY, encoder=True, kv_heads=1, parts=("LTG",), out=tmp_path))
    assert report.decode == []
    assert [cost.name for cost in report.layers] == ["attention", "FEM LTG"]


def test_peak_memory_of_a_layer_repeats_to_the_byte() -> None:
    for c in layer.contestants(TINY).values():
        c.train_and_clear()
        assert len({measure.peak_memory(c.train_and_clear, CPU) for _ in range(2)}) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["layer", "--parts", "LTX"], "parts='LTX'"),
        (["layer", "--dim", "25", "--heads", "3"], "dim=25"),
        (["layer", "--rounds", "0"], "rounds=0"),
        (["layer", "--context", "0"], "context=0"),
        (["layer", "--decode-steps", "1000"], "decode_steps=1000"),
        (["layer", "--prior", "sofmax"], "prior='sofmax'"),
        (["layer", "--modes", "eager", "eager"], "modes="),
        (["laier"], "bench='laier'"),
    ],
)
def test_wrong_input_is_named(args: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        cli.main([*args, "--out", str(tmp_path)])


def test_markdown_has_a_row_per_line() -> None:
    table = Table("title", ("layer", "ms"), [("attention", "1.2"), ("FEM", "1.3")])
    assert table.markdown().splitlines() == [
        "title",
        "",
        "| layer | ms |",
        "| --- | ---: |",
        "| attention | 1.2 |",
        "| FEM | 1.3 |",
    ]
