"""FEM put into transformers models: the function stays, caches and generation work, and fine-tuning can use it."""

import copy
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DeiTForImageClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    StaticCache,
)

from femixer import free_energy
from femixer.cli import main
from femixer.surgery import FAMILIES, load, upgrade
from femixer.surgery.attention import fem_attention
from femixer.surgery.gates import Bounded, ReadGates

WIDTHS = {"hidden_size": 42, "intermediate_size": 53, "num_hidden_layers": 2, "num_attention_heads": 6}
TEXT = WIDTHS | {
    "num_key_value_heads": 6,
    "vocab_size": 97,
    "max_position_embeddings": 71,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGES = WIDTHS | {"image_size": 15, "patch_size": 5, "num_labels": 7}
# What makes a family's attention its own: grouped heads, windows, widths, scales, rotations, norms.
OWN = {
    "cohere": {"use_qk_norm": True},
    "gemma": {"num_key_value_heads": 1, "head_dim": 10},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "granite": {"attention_multiplier": 0.3, "num_key_value_heads": 2},
    "llama": {"num_key_value_heads": 2, "hidden_size": 36},  # rotary widths are even
    "mistral": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5},
    "opt": {"ffn_dim": 53, "word_embed_proj_dim": 42},
    "phi3": {"num_key_value_heads": 3, "hidden_size": 48, "sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 3, "head_dim": 10},
    "starcoder2": {"num_key_value_heads": 2},
}
EVEN = ("cohere", "gpt_neox", "granite", "olmo2", "phi", "qwen2", "smollm3", "stablelm", "starcoder2")
VISION = ("deit", "dinov2", "vit")
ENCODERS = ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")
DECODERS = tuple(family for family in FAMILIES if family not in VISION + ENCODERS)


def build(family: str, **changes: object) -> nn.Module:
    """A random model with weights large enough that every part of it matters."""
    torch.manual_seed(7)
    sizes = IMAGES if family in VISION else TEXT | ({"hidden_size": 48} if family in EVEN else {})
    if family == "distilbert":
        sizes |= {"dim": 42, "hidden_dim": 53, "n_layers": 2, "n_heads": 6}
    config = CONFIG_MAPPING[family](**(sizes | OWN.get(family, {}) | changes))
    auto = AutoModelForCausalLM
    if family in ENCODERS:
        auto = AutoModelForMaskedLM
    elif family in VISION:
        auto = AutoModelForImageClassification
    # Auto has two classes for a DeiT and needs to be told which one.
    model = DeiTForImageClassification(config) if family == "deit" else auto.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "embed" not in name:
            parameter.data *= 4
    return model.eval()


def inputs(family: str) -> dict[str, torch.Tensor]:
    """Images, or tokens with padding: left for decoders, right for encoders."""
    if family in VISION:
        return {"pixel_values": torch.randn(3, 3, 15, 15)}
    padding = torch.arange(17) < torch.tensor([0, 4, 11])[:, None]
    if family in ENCODERS:
        padding = padding.flip(1)
    ids = torch.randint(3, 97, (3, 17)).masked_fill(padding, 0)
    return {"input_ids": ids, "attention_mask": (~padding).long()}


def open_gates(model: nn.Module) -> nn.Module:
    """Temperatures and gates far from their start."""
    torch.manual_seed(11)
    for name, parameter in model.named_parameters():
        if name.endswith("lam_max"):
            parameter.data.uniform_(0.3, 1)
        elif ".fem." in name:
            parameter.data += torch.randn_like(parameter) * (1.0 if name.endswith("raw_beta") else 0.2)
    return model


def upgraded(family: str, parts: str = "LTG", **changes: object) -> nn.Module:
    return open_gates(upgrade(build(family, **changes), parts, rank=5))


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


def test_saving_and_loading_is_bit_for_bit(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model, given = upgraded("qwen3"), inputs("qwen3")
    model.save_pretrained(tmp_path)
    assert not [*tmp_path.glob("*.bin")]
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["fem_parts"], config["fem_rank"]) == ("fem_qwen3", "LTG", 5)
    for again in (load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert type(again) is type(model)
        assert again.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
        assert torch.equal(again.eval()(**given).logits, model(**given).logits)
    bare = AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(bare(**given)[0], model.model(**given)[0])
    with pytest.raises(ValueError, match="upgraded already"):
        upgrade(again)


@pytest.mark.parametrize("family", ["bert", "deit", "gpt2", "vit"])
def test_every_kind_is_loaded_by_its_auto_class(family: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    model, given = upgraded(family, "LT"), inputs(family)
    model.save_pretrained(tmp_path)
    again = load(tmp_path).eval()
    assert type(again) is type(model)
    assert torch.equal(again(**given).logits, model(**given).logits)
    auto = {"gpt2": AutoModelForCausalLM, "bert": AutoModelForMaskedLM}.get(family, AutoModelForImageClassification)
    assert type(auto.from_pretrained(tmp_path)) is type(model)


def test_files_with_other_names_than_the_modules_are_loaded_into_every_class(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """transformers renames the weights of ViT when it loads and when it saves them."""
    build("vit").save_pretrained(tmp_path / "old")
    model, given = upgrade(load(tmp_path / "old")).eval(), inputs("vit")
    model.save_pretrained(tmp_path / "new")
    assert torch.equal(load(tmp_path / "new").eval()(**given).logits, model(**given).logits)
    bare = AutoModel.from_pretrained(tmp_path / "new", add_pooling_layer=False).eval()
    assert torch.equal(bare(**given)[0], model.vit(**given)[0])
    bare.save_pretrained(tmp_path / "bare")
    assert torch.equal(load(tmp_path / "bare", add_pooling_layer=False).eval()(**given)[0], bare(**given)[0])


def test_names_of_an_original_in_another_spelling_are_not_kept(tmp_path) -> None:  # type: ignore[no-untyped-def]
    build("llama").save_pretrained(tmp_path / "old")
    weights = load_file(tmp_path / "old" / "model.safetensors")
    other = {name.replace("q_proj", "questions"): tensor for name, tensor in weights.items()}
    save_file(other, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    model = upgrade(LlamaForCausalLM.from_pretrained(tmp_path / "old", key_mapping={"questions": "q_proj"})).eval()
    model.save_pretrained(tmp_path / "new")
    again, given = load(tmp_path / "new").eval(), inputs("llama")
    assert torch.equal(again(**given).logits, model(**given).logits)


def test_a_checkpoint_without_gates_is_not_taken_for_an_upgraded_one(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = build("llama")
    model.save_pretrained(tmp_path)
    kind = type(upgrade(model))
    config = AutoConfig.from_pretrained(tmp_path)
    config.__class__ = kind.config_class
    with pytest.raises(ValueError, match="not an upgraded model"):
        kind.from_pretrained(tmp_path, config=config)


def test_copies_by_pickle_and_deepcopy_are_the_same_model() -> None:
    model, given = upgraded("llama"), inputs("llama")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**given).logits, model(**given).logits)


def test_a_model_with_the_same_configuration_is_left_alone() -> None:
    first = build("llama")
    second = LlamaForCausalLM(first.config).eval()
    given = inputs("llama")
    before = second(**given).logits
    upgrade(first)
    assert second.config.model_type == "llama"
    assert torch.equal(second(**given).logits, before)


def test_hidden_states_can_still_be_asked_for() -> None:
    model = upgrade(build("llama").model)
    states = model(**inputs("llama"), output_hidden_states=True).hidden_states
    assert len(states) == 3


def test_every_gate_has_a_gradient_from_the_first_step() -> None:
    model, given = upgrade(build("llama"), "LTG"), inputs("llama")
    model(**given, labels=given["input_ids"]).loss.backward()
    for name, parameter in model.named_parameters():
        # The outer gate's `down` waits one step for its `up`, as in LoRA.
        if ".fem." in name and not name.endswith("gate_logits.down"):
            assert parameter.grad.abs().max() > 0, name
    largest = max(p.grad.abs().max() for n, p in model.named_parameters() if n.endswith("lam_max"))
    assert largest > 1e-4  # and not a millionth of it, as behind sigmoid(-14)


def test_fine_tuning_the_gates_moves_them_and_lowers_the_loss() -> None:
    model, given = upgrade(build("llama"), "LTG"), inputs("llama")
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    gates = {name: p for name, p in model.named_parameters() if ".fem." in name}
    start = {name: p.detach().clone() for name, p in gates.items()}
    optimizer = torch.optim.AdamW(gates.values(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = model(**given, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.02
    for layer in model.model.layers:
        fem = layer.self_attn.fem
        beta = fem.beta.detach()
        assert (beta - 1.95).abs().max() > 0.02
        assert fem.lam_max.max() > 0.05
        lam = fem.lam(torch.randn(3, 5, 36))
        assert lam.min() >= 0 and lam.max() <= 1
    assert all((gates[name] - start[name]).abs().max() > 1e-3 for name in gates)


def test_a_bounded_parameter_comes_back_from_beyond_its_bounds() -> None:
    x = torch.tensor([-0.1, -0.1, 0.5, 1.1, 1.1], requires_grad=True)
    bounded = Bounded.apply(x)
    assert bounded.tolist() == [0, 0, 0.5, 1, 1]
    bounded.backward(torch.tensor([1.0, -1, 1, 1, -1]))
    assert x.grad.tolist() == [0, -1, 1, 1, 0]


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    gradients = []
    for checkpointing in (False, True):
        model, given = upgraded("llama").train(), inputs("llama")
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**given, labels=given["input_ids"]).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_dropout_acts_in_training_and_keeps_results_finite() -> None:
    model, given = upgraded("bert").train(), inputs("bert")
    a, b = (model(**given).logits for _ in range(2))
    assert a.isfinite().all() and not torch.equal(a, b)


@torch.no_grad()
def test_bfloat16_is_as_good_as_the_original_in_bfloat16(tmp_path) -> None:  # type: ignore[no-untyped-def]
    given = inputs("llama")
    real = given["attention_mask"].bool()
    # Loaded and not converted: .bfloat16() would round the rotary frequencies too.
    build("llama").bfloat16().save_pretrained(tmp_path / "old")
    model, exact = load(tmp_path / "old").eval(), load(tmp_path / "old", dtype=torch.float64).eval()(**given).logits
    before = model(**given).logits
    upgrade(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    errors = [(logits - exact)[real].abs().max() for logits in (model(**given).logits, before)]
    assert 0 < errors[0] < 2 * errors[1]
    model.save_pretrained(tmp_path / "new")
    again = load(tmp_path / "new").eval()
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert torch.equal(again(**given).logits, model(**given).logits)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own doing
def test_a_compiled_model_is_one_graph_with_the_same_results() -> None:
    model, given = upgraded("llama", num_hidden_layers=1), inputs("llama")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for names in (["input_ids"], ["input_ids", "attention_mask"]):
        chosen = {name: given[name] for name in names}
        assert (compiled(**chosen).logits - model(**chosen).logits).abs().max() < 1e-5


@pytest.mark.parametrize("parts", ["", "L", "G", "CLT", "CLTG", "TL"])
def test_parts_that_change_the_function_or_need_a_state_are_refused(parts: str) -> None:
    with pytest.raises(ValueError, match="LT or LTG"):
        upgrade(build("llama"), parts)


def test_what_cannot_be_upgraded_is_named() -> None:
    with pytest.raises(ValueError, match=r"'gemma2' cannot be upgraded; known are bert, .*llama, .*vit"):
        upgrade(Gemma2ForCausalLM(Gemma2Config(**TEXT, head_dim=8)))
    with pytest.raises(TypeError, match="PreTrainedModel, not Linear"):
        upgrade(nn.Linear(2, 3))
    with pytest.raises(ValueError, match="rank=0"):
        upgrade(build("llama"), rank=0)
    with pytest.raises(ValueError, match="output_attentions=True"):
        upgrade(build("llama", attn_implementation="eager", output_attentions=True))


def test_what_an_upgraded_model_cannot_do_is_an_error_and_not_another_result() -> None:
    model, given = upgraded("llama"), inputs("llama")
    with pytest.raises(ValueError, match="output_attentions"):
        model(**given, output_attentions=True)
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        model.set_attn_implementation("sdpa")
    x = torch.randn(1, 6, 5, 6)
    with pytest.raises(ValueError, match="softcap"):
        fem_attention(model.model.layers[0].self_attn, x, x, x, None, fem_states=torch.randn(1, 5, 36), softcap=50.0)


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")


def test_the_command_saves_a_model_that_auto_classes_load(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    original = build("llama")
    original.save_pretrained(tmp_path / "old")
    tokenizer().save_pretrained(tmp_path / "old")
    out = tmp_path / "new"
    assert main(["upgrade", str(tmp_path / "old"), "--out", str(out), "--parts", "LTG", "--rank", "3"]) == 0
    shown = capsys.readouterr().out
    added = sum(p.numel() for n, p in load(out).named_parameters() if ".fem." in n)
    per_layer = 2 * (3 * (36 + 36) + 36) + 36 + 2 * 6  # two maps, lam_max, beta
    assert added == 2 * per_layer
    assert f"+ {added:,} (" in shown and "largest change" in shown
    ids = AutoTokenizer.from_pretrained(out)("w5 w6 w7", return_tensors="pt").input_ids
    assert torch.equal(ids, torch.tensor([[5, 6, 7]]))
    with torch.no_grad():
        assert (AutoModelForCausalLM.from_pretrained(out)(ids).logits - original(ids).logits).abs().max() < 1e-5
    assert main(["upgrade", str(tmp_path / "old"), "--out", str(out)]) == 2
    assert "does not exist yet" in capsys.readouterr().err
    assert main(["upgrade", str(out), "--out", str(tmp_path / "twice")]) == 2
    assert "upgraded already" in capsys.readouterr().err


def test_the_command_upgrades_images_models_and_refuses_pickles(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    model = build("vit")
    model.save_pretrained(tmp_path / "vit")
    assert main(["upgrade", str(tmp_path / "vit"), "--out", str(tmp_path / "new")]) == 0
    assert "FEMViTForImageClassification" in capsys.readouterr().out
    (tmp_path / "vit" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "vit" / "pytorch_model.bin")
    assert main(["upgrade", str(tmp_path / "vit"), "--out", str(tmp_path / "newer")]) == 2
    assert "pickle" in capsys.readouterr().err
    with pytest.raises(OSError, match="safetensors"):
        load(tmp_path / "vit")
    (tmp_path / "new" / "model.safetensors").unlink()
    torch.save(upgrade(model).state_dict(), tmp_path / "new" / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        AutoModelForImageClassification.from_pretrained(tmp_path / "new")
