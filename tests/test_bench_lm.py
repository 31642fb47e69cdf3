"""Properties of the language model benchmark: equal sizes, the right things timed, ratios the right way round."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from femixer import bench
from femixer.bench import measure
from femixer.bench.calls import Clock, cache_bytes
from femixer.bench.lm import (
    DECODE_SIZE,
    TRAINING_SIZE,
    Contestant,
    DecodeCost,
    Options,
    Report,
    Speed,
    TrainingCost,
    decoding,
    generator_of,
    measure_decode,
    measure_training,
    tables,
    training_of,
)
from femixer.models import FEMCache, preset

TINY = Options(
    dim=24,
    heads=3,
    layers=2,
    vocabulary=31,
    length=13,
    contexts=(5, 17),
    decode_steps=3,
    rounds=2,
    warmup=1,
    threads=1,
    priors=("softmax", "aft"),
)
MODEL = ["--dim", "24", "--heads", "3", "--layers", "2", "--vocabulary", "31"]
SIZE = [*MODEL, "--length", "13", "--contexts", "5", "17", "--decode-steps", "3"]


def test_the_default_size_is_the_preset_small() -> None:
    small, options = preset("small"), Options()
    assert (options.dim, options.layers, options.heads, options.length) == (
        small.hidden_size,
        small.num_hidden_layers,
        small.num_attention_heads,
        small.max_position_embeddings,
    )


@pytest.mark.parametrize("kv_heads", [None, 1])
def test_all_models_have_the_parameters_of_llama(kv_heads: int | None) -> None:
    options = replace(Options(), kv_heads=kv_heads, priors=("softmax",))
    with torch.device("meta"):
        llama, attention, fem, _ = (c.model(options).num_parameters() for c in decoding(options))
    assert llama == attention
    assert 1 <= fem / llama < 1.02


def test_llama_is_what_transformers_gives_and_its_cache_its_own() -> None:
    model = Contestant("llama").build(TINY).eval()
    assert model.config._attn_implementation == "sdpa"
    assert isinstance(generator_of(model, 5, TINY).cache, DynamicCache)


def test_both_caches_of_the_softmax_prior_are_measured() -> None:
    def found(**changes: Any) -> list[tuple[str, str | None]]:
        return [(c.prior, c.cache) for c in decoding(replace(TINY, **changes))][2:]

    assert found() == [("softmax", "value"), ("softmax", "exp"), ("aft", None)]
    assert found(parts="C") == [("softmax", None), ("aft", None)]
    assert found(priors=("softmax:cache=exp,window=7",)) == [("softmax:cache=exp,window=7", "exp")]
    mixer = Contestant("softmax:window=7", "exp").model(TINY).model.layers[1].mixer
    assert (mixer.prior.window, mixer.prior.cache) == (7, "exp")


@pytest.mark.parametrize("prior", ["llama", "softmax", "aft"])
def test_decoding_goes_on_after_the_context_one_token_at_a_time(prior: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Contestant(prior).build(TINY).eval()
    generator = generator_of(model, 17, TINY)
    seen: list[tuple[int, int]] = []
    handed: list[torch.Tensor] = []
    monkeypatch.setattr(Clock, "put", lambda clock, value: (handed.append(value), clock.times.append(len(handed) ** 2)))

    def note(module: Any, args: Any, kwargs: Any) -> None:
        seen.append((kwargs["past_key_values"].get_seq_length(), kwargs["input_ids"].shape[1]))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    seconds = generator.time()
    hook.remove()
    # The prompt and four tokens at 1, 4, 9, 16, 25: the steps after the first took 5, 7 and 9.
    assert seconds == 7
    assert seen == [(17, 1), (18, 1), (19, 1), (20, 1)]
    assert generator.cache.get_seq_length() == 17  # every sample starts there
    expected = model.generate(  # type: ignore[misc]
        generator.tokens, attention_mask=torch.ones_like(generator.tokens), do_sample=False, max_new_tokens=4
    )
    assert torch.cat([token.view(-1) for token in handed[1:]]).tolist() == expected[0, 18:].tolist()


def test_cache_bytes_are_those_worked_out_by_hand() -> None:
    options = replace(TINY, decode_batch=2)
    with torch.no_grad():
        sizes = {}
        for contestant in decoding(options):
            generator = generator_of(contestant.build(options).eval(), 17, options)
            sizes[contestant.prior, contestant.cache] = (generator.cache_bytes, generator.grows)
    keys = 2 * 17 * 24 * 4  # two layers, float32
    assert sizes["llama", None] == sizes["attention", None] == (2 * keys, True)
    # Values are half as wide; positions and what does not grow come on top.
    value, exp = (sizes["softmax", cache] for cache in ("value", "exp"))
    assert exp[0] - value[0] == keys / 2 and value[1] and exp[1]
    assert 1.5 * keys < value[0] < 2 * keys
    assert not sizes["aft", None][1]


def test_cache_bytes_of_an_empty_cache_are_none() -> None:
    assert cache_bytes(FEMCache(3)) == cache_bytes(DynamicCache()) == 0


def test_compiled_models_are_trained_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: compiled.append(model) or model)
    tokens = torch.randint(31, (2, 13))
    training_of(Contestant("softmax"), tokens, TINY)
    assert not compiled
    training_of(Contestant("softmax"), tokens, replace(TINY, compile=True))
    assert len(compiled) == 1


def test_ratios_are_of_speeds_against_the_right_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama takes 4 s, the plain transformer 2 s, FEM 5 s, in every round."""
    cost = {"llama": 4.0, "attention": 2.0}

    def race(samples: Any, rounds: int, *_: object) -> dict[Any, list[float]]:
        return {key: [cost.get((key[0] if isinstance(key, tuple) else key).prior, 5.0)] * rounds for key in samples}

    monkeypatch.setattr(measure, "race", race)
    options = replace(TINY, priors=("aft",))
    trained = {c.prior: c.speed for c in measure_training(options)}
    assert [(s.ratio.median, s.tokens_per_second.median) for s in trained.values()] == [
        (0.5, 26 / 4),
        (1.0, 26 / 2),
        (0.4, 26 / 5),
    ]
    decoded = [(c.prior, c.context, c.speed.ratio.median, c.speed.tokens_per_second.median, c.cache_ratio == 1)
               for c in measure_decode(options) if c.context == 17]  # fmt: skip
    assert decoded == [
        ("llama", 17, 1.0, 0.25, True),
        ("attention", 17, 2.0, 0.5, True),
        ("aft", 17, 0.8, 0.2, False),
    ]


def test_the_command_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = ["--rounds", "2", "--warmup", "0", "--threads", "1", "--targets", "--out", str(tmp_path)]
    assert bench.main(["lm", *SIZE, "--priors", "softmax", "aft", *rounds]) == 0
    written = json.loads((tmp_path / "lm.json").read_text())
    assert set(written) == {"benchmark", "settings", "environment", "training", "decode"}
    assert written["environment"]["transformers"]
    assert [c["prior"] for c in written["training"]] == ["llama", "attention", "softmax", "aft"]
    assert len(written["decode"]) == 5 * 2
    for cost in written["training"] + written["decode"]:
        assert len(cost["speed"]["samples"]) == 2 and min(cost["speed"]["samples"]) > 0
    shown, text = capsys.readouterr().out, (tmp_path / "lm.md").read_text()
    for part in ("FEM softmax CLTG", "context 17", "5 to 17", "2 layers, dim 24, 3 heads", "constant"):
        assert part in shown and part in text


def test_one_measurement_alone_has_only_its_tables(tmp_path: Path) -> None:
    options = ["--priors", "aft", "--rounds", "1", "--warmup", "0", "--measure", "decode", "--out", str(tmp_path)]
    bench.main(["lm", *SIZE, "--contexts", "5", *options])
    assert json.loads((tmp_path / "lm.json").read_text())["training"] == []
    text = (tmp_path / "lm.md").read_text()
    assert "Training" not in text and "Growth" not in text and "Greedy" in text


def report(**changes: object) -> Report:
    """FEM with softmax needs 1.25 (training) and 1.25 or 1.1 (decoding) of its rival's time."""
    settings = {**TRAINING_SIZE, **DECODE_SIZE, "compile": False, **changes}

    def speed(seconds: float) -> Speed:
        return Speed.of(1, [seconds] * 2, [1.0] * 2)

    decode = [
        DecodeCost("Llama", "llama", None, 128, speed(1), 100, 1.0, 8.0),
        DecodeCost("Llama", "llama", None, 1024, speed(1), 100, 1.0, 8.0),
        DecodeCost("FEM", "softmax", "value", 128, speed(1), 75, 0.75, 6.0),
        DecodeCost("FEM", "softmax", "value", 1024, speed(1.25), 75, 0.75, 6.0),
        DecodeCost("FEM", "softmax", "exp", 1024, speed(1.1), 100, 1.0, 8.0),
        DecodeCost("FEM gla", "gla", None, 128, speed(1), 10, 0.1, None),
        DecodeCost("FEM gla", "gla", None, 1024, speed(1.2), 10, 0.1, None),
    ]
    train = [TrainingCost("plain", "attention", 7, speed(1)), TrainingCost("FEM", "softmax", 7, speed(1.25))]
    return Report(settings, {"threads": 1, "torch": "2", "transformers": "5"}, train, decode)


def cells(given: Report, targets: bool = True) -> list[Sequence[str]]:
    return [row for table in tables(given, targets) for row in table.rows]


def test_targets_are_lower_limits_of_speeds_and_upper_limits_of_caches_and_growth() -> None:
    train, short, long, grown = tables(report(), True)
    assert [row[-1] for row in train.rows] == ["1", "0.800 [0.800–0.800] < 0.85"]
    assert not any("≥" in cell or "<" in cell for row in short.rows for cell in row)
    llama, value, exp, gla = long.rows
    assert llama[4] == llama[6] == "1"
    assert (value[4], value[6]) == ("0.800 [0.800–0.800] < 0.90", "0.750 ≤ 0.78")
    assert (exp[4], exp[6]) == ("0.909 [0.909–0.909] ≥ 0.90", "1.000")
    assert (gla[4], gla[6], gla[7]) == ("0.833 [0.833–0.833]", "0.100", "constant")
    assert [row[2:] for row in grown.rows] == [
        ["128 to 1024", "1.000 [1.000–1.000]"],
        ["128 to 1024", "1.250 [1.250–1.250]"],
        ["1024 to 1024", "1.000 [1.000–1.000]"],
        ["128 to 1024", "1.200 [1.200–1.200] > 1.10"],
    ]


@pytest.mark.parametrize("changes", [{"dim": 256}, {"parts": "LTG"}, {"dtype": "bfloat16"}, {"layers": 4}])
def test_targets_are_for_their_size_only(changes: dict[str, object]) -> None:
    for given in (cells(report(**changes)), cells(report(), targets=False)):
        assert not any(sign in cell for row in given for cell in row for sign in "≥≤<>")
