"""Upgraded models compute what the originals do, and with open gates what the definition says."""

from types import SimpleNamespace

import pytest
import torch
from surgery_models import ENCODERS, VISION, build, inputs, open_gates, upgraded
from torch import nn
from transformers import (
    StaticCache,
)

from femixer import free_energy
from femixer.surgery import FAMILIES, upgrade
from femixer.surgery.attention import ReadGates, fem_attention

DECODERS = tuple(family for family in FAMILIES if family not in VISION + ENCODERS)


def expected_read(gates: ReadGates, p: torch.Tensor, v: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The definition in float64: p [B, H, T, S], v [B, G, S, D], states [B, T, dim] -> [B, T, H, D]."""
    p, v, states = p.double(), v.double(), states.double()
    repeats = p.shape[1] // v.shape[1]
    beta = torch.nn.functional.softplus(gates.raw_beta.double() + 1.8)
    v, beta = v.repeat_interleave(repeats, 1), beta.repeat_interleave(repeats, 0)

    def logits(low_rank: nn.Module) -> torch.Tensor:
        low = torch.einsum("btd,rd->btr", states, low_rank.down.double())
        out = torch.einsum("btr,or->bto", low, low_rank.up.double()) + low_rank.bias.double()
        return out.unflatten(-1, beta.shape)

    mean, free = (free_energy(p, v, b).transpose(1, 2) for b in (0.0, beta[:, None]))
    lam = gates.lam_max.double() * torch.sigmoid(logits(gates.lam_logits))
    g = torch.nn.functional.softplus(logits(gates.gate_logits))
    return g / g.square().mean(-1, keepdim=True).sqrt() * ((1 - lam) * mean + lam * free)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_an_upgrade_keeps_the_logits(family: str) -> None:
    model, given = build(family), inputs(family)
    before = model(**given).logits
    upgrade(model, "LTG", rank=5)
    after = model(**given).logits
    assert (after - before).abs().max() < 1e-5
    assert (open_gates(model)(**given).logits - before).abs().max() > 1e-3


@pytest.mark.parametrize("additive", [False, True])
@torch.no_grad()
def test_a_mask_of_the_users_own_is_obeyed(additive: bool) -> None:
    """Five tokens of prefix that see each other, in a causal model."""
    model, ids = build("llama"), inputs("llama")["input_ids"][:1]
    mask = torch.ones(1, 1, 17, 17, dtype=torch.bool).tril()
    mask[..., :5, :5] = True
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    before = model(ids, attention_mask=mask).logits
    assert (model(ids).logits - before).abs().max() > 1e-3
    upgrade(model)
    assert (model(ids, attention_mask=mask).logits - before).abs().max() < 1e-5


@torch.no_grad()
def test_attention_to_an_encoder_stays_as_it_is() -> None:
    model, given = build("gpt2", add_cross_attention=True), inputs("gpt2")
    given |= {"encoder_hidden_states": torch.randn(3, 17, 42), "encoder_attention_mask": torch.rand(3, 17).round()}
    before = model(**given).logits
    upgrade(model)
    assert (model(**given).logits - before).abs().max() < 1e-5
    assert not hasattr(model.transformer.h[0].crossattention, "fem")


@pytest.mark.parametrize("family", DECODERS)
def test_generation_is_the_original_models(family: str) -> None:
    """Greedy and by beams, left-padded, with a cache of transformers' own."""
    model, given = build(family), inputs(family)
    settings = [{"max_new_tokens": 8}, {"max_new_tokens": 5, "num_beams": 3}]
    expected = [model.generate(**given, do_sample=False, **s) for s in settings]
    upgrade(model)
    for setting, tokens in zip(settings, expected, strict=True):
        assert torch.equal(model.generate(**given, do_sample=False, **setting), tokens)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gpt2"])
@torch.no_grad()
def test_with_open_gates_a_cache_changes_nothing(family: str) -> None:
    model, ids = upgraded(family), inputs(family)["input_ids"][:1]
    whole = model(ids).logits
    past, steps = None, []
    for piece in ids.split([6, 1, 1, 4, 1, 4], 1):
        out = model(piece, past_key_values=past, use_cache=True)
        past = out.past_key_values
        steps.append(out.logits)
    assert (torch.cat(steps, 1) - whole).abs().max() < 1e-5
    with torch.enable_grad():  # a past that still carries gradients can be continued without them
        past = model(ids[:, :-1], use_cache=True).past_key_values
    assert (model(ids[:, -1:], past_key_values=past).logits - whole[:, -1:]).abs().max() < 1e-5
    tokens = [model.generate(ids, max_new_tokens=9, do_sample=False, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*tokens)


@torch.no_grad()
def test_with_open_gates_a_static_cache_changes_nothing() -> None:
    model, ids = upgraded("llama"), inputs("llama")["input_ids"][:1]
    whole = model(ids).logits
    past = StaticCache(config=model.config, max_cache_len=23)
    steps = [model(piece, past_key_values=past).logits for piece in ids.split([6, 1, 10], 1)]
    assert (torch.cat(steps, 1) - whole).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@torch.no_grad()
def test_with_open_gates_a_padded_batch_is_its_rows_one_by_one(family: str) -> None:
    model, given = upgraded(family), inputs(family)
    lengths = given["attention_mask"].sum(1)
    position = (given["attention_mask"].cumsum(1) - 1).clamp_min(0)
    batch = model(**given, position_ids=position).logits
    for row, ids, length in zip(batch, given["input_ids"], lengths, strict=True):
        assert (model(ids[None, -length:]).logits - row[-length:]).abs().max() < 1e-5
    tokens = model.generate(**given, max_new_tokens=6, do_sample=False)
    for row, ids, length in zip(tokens, given["input_ids"], lengths, strict=True):
        alone = model.generate(ids[None, -length:], max_new_tokens=6, do_sample=False)[0]
        assert torch.equal(row[-len(alone) :][: len(alone)], alone) or alone[-1] == model.config.eos_token_id


@pytest.mark.parametrize("family", ["bert", "distilbert"])
@torch.no_grad()
def test_padding_of_an_encoder_does_not_matter(family: str) -> None:
    model, given = upgraded(family), inputs(family)
    other = given["input_ids"].masked_fill(given["attention_mask"] == 0, 43)
    real = given["attention_mask"].bool()
    changed = model(other, attention_mask=given["attention_mask"]).logits
    assert (changed - model(**given).logits)[real].abs().max() < 1e-5
    assert (model(other).logits - changed)[real].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("family", "attention", "value", "out"),
    [
        ("llama", "model.layers.1.self_attn", "v_proj", "o_proj"),
        ("mistral", "model.layers.1.self_attn", "v_proj", "o_proj"),
        ("qwen3", "model.layers.1.self_attn", "v_proj", "o_proj"),
        ("bert", "bert.encoder.layer.1.attention.self", "value", None),
        ("vit", "vit.layers.1.attention", "v_proj", "o_proj"),
    ],
)
@torch.no_grad()
def test_the_read_is_the_definition_on_the_models_own_weights(
    family: str, attention: str, value: str, out: str | None
) -> None:
    """p from the original with output_attentions, v from its projection; the layer before still reads the mean."""
    original, given = build(family, attn_implementation="eager"), inputs(family)
    kept = {}

    def keep(name):  # type: ignore[no-untyped-def]
        def hook(module, args, kwargs, output):  # type: ignore[no-untyped-def]
            kept[name] = args[0] if args else kwargs["hidden_states"]
            kept[name + " out"] = output

        return hook

    module = original.get_submodule(attention)
    module.register_forward_hook(keep("states"), with_kwargs=True)
    module.get_submodule(value).register_forward_hook(keep("value"), with_kwargs=True)
    p = original(**given, output_attentions=True).attentions[1]
    width = module.get_submodule(value).weight.shape[0] // (getattr(original.config, "num_key_value_heads", None) or 6)
    v = kept["value out"].unflatten(-1, (-1, width)).transpose(1, 2)
    states = kept["states"]

    model = upgrade(build(family), "LTG", rank=5)
    module = open_gates(model.get_submodule(attention))
    model.get_submodule(attention).fem.lam_max.data.uniform_(0.3, 1)
    (module if out is None else module.get_submodule(out)).register_forward_hook(keep("read"), with_kwargs=True)
    model(**given)
    read = kept["read out"][0] if out is None else kept["read"]
    expected = expected_read(module.fem, p, v, states).flatten(-2)
    seen = given["attention_mask"].bool() if "attention_mask" in given and family != "bert" else ...
    assert (read - expected)[seen].abs().max() < 1e-5
    assert (expected - (p @ v.repeat_interleave(6 // v.shape[1], 1)).transpose(1, 2).flatten(-2)).abs().max() > 0.05


@torch.no_grad()
@pytest.mark.parametrize("extra", [0, 5])
def test_extreme_values_that_a_row_cannot_see_do_not_decide_it(extra: int) -> None:
    """Exact where |beta v| is in the thousands and where a future or masked value is larger by that."""
    torch.manual_seed(3)
    b, h, g, t, d = 2, 4, 2, 13, 7
    s = t + extra
    query, key, value = torch.randn(b, h, t, d), torch.randn(b, g, s, d), torch.randn(b, g, s, d)
    value[:, :, -1] *= 3e3
    value[1, :, 0] = 1e4
    module = SimpleNamespace(is_causal=True, fem=open_gates(ReadGates(11, h, g, d, "LTG", 3)))
    module.fem.lam_max.data.fill_(0.7)
    seen = torch.ones(t, s, dtype=torch.bool).tril(extra).repeat(b, 1, 1, 1)
    seen[1, :, :, :2] = False  # two tokens of left padding
    states = torch.randn(b, t, 11)
    scores = query.double() @ key.double().repeat_interleave(2, 1).mT * 0.4
    p = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0)
    expected = expected_read(module.fem, p, value, states)
    real = seen.any(-1).transpose(1, 2)[..., 0]
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    for mask in (seen, additive):
        read = fem_attention(module, query, key, value, mask, scaling=0.4, fem_states=states)[0]
        error = (read - expected).abs() / expected.abs().clamp_min(1)
        assert error[real].max() < 1e-5
        assert (read[~real] == 0).all()
