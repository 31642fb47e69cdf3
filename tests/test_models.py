"""Language models: what transformers' own models promise, for every mixer and prior."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import WORDS, stirred, text, tokens
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, set_seed

from femixer import FreeEnergyMixer
from femixer.models import PRESETS, FEMCache, FEMConfig, FEMForCausalLM, FEMModel, preset

MODELS = {
    "attention": {"mixer": "attention"},
    "softmax": {"prior": "softmax"},
    "softmax-plain": {"prior": "softmax", "parts": ""},
    "softmax-grouped-window": {"prior": "softmax", "num_key_value_heads": 1, "window": 5},
    "softmax-exp-cache": {"prior": "softmax", "prior_options": {"softmax": {"cache": "exp"}}},
    "linear": {"prior": "linear"},
    "gla": {"prior": "gla"},
    "aft": {"prior": "aft"},
    "decay": {"prior": "decay"},
    "ssm": {"prior": "ssm"},
    "mamba": {"prior": "mamba"},
    "mamba-interactive": {"prior": "mamba-interactive"},
    "hybrid": {"prior": ["gla", "softmax"], "prior_options": {"gla": {"decay": "channel"}}},
    "hybrid-baseline": {"mixer": ["fem", "attention"], "prior": "aft"},
}


def build(name: str = "softmax", **fields: object) -> FEMForCausalLM:
    """A model whose parameters are all away from their starting values, as after training."""
    return stirred(text(**{"num_hidden_layers": 3, "pad_token_id": 0, **MODELS[name], **fields}))


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> FEMForCausalLM:
    return build(request.param)


def test_greedy_sampled_and_beam_generation_are_the_same_with_and_without_cache(model):
    ids = tokens(2, 7)
    for how in ({"do_sample": False}, {"do_sample": True, "top_k": 9}, {"num_beams": 3, "do_sample": False}):
        texts = []
        for use_cache in (True, False):
            set_seed(3)
            texts.append(model.generate(ids, max_new_tokens=11, use_cache=use_cache, **how))
        assert torch.equal(*texts), how
    assert torch.equal(texts[0][:, :7], ids)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"use_cache": False}], ids=str)
def test_embeddings_generate_what_their_tokens_do(how):
    model, ids = build("hybrid"), tokens(2, 7)
    mask = torch.ones_like(ids).index_fill(1, torch.tensor([0, 1]), 0)
    how = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, **how}
    found = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **how)
    assert torch.equal(found, model.generate(ids, **how)[:, 7:])


def test_a_left_padded_batch_generates_what_its_sequences_generate_alone(model):
    lengths = (11, 5, 2)
    alone = [tokens(1, length, seed=length) for length in lengths]
    batch, mask = torch.zeros(3, 11, dtype=torch.long), torch.zeros(3, 11, dtype=torch.long)
    for row, ids in enumerate(alone):
        batch[row, 11 - ids.shape[1] :], mask[row, 11 - ids.shape[1] :] = ids[0], 1
    for how in ({}, {"num_beams": 2}):
        together = model.generate(batch, attention_mask=mask, max_new_tokens=9, do_sample=False, **how)
        for row, ids in enumerate(alone):
            single = model.generate(ids, max_new_tokens=9, do_sample=False, **how)
            assert torch.equal(together[row, 11:], single[0, ids.shape[1] :]), (row, how)
    logits = model(batch, attention_mask=mask).logits
    for row, ids in enumerate(alone):
        torch.testing.assert_close(logits[row, 11 - ids.shape[1] :], model(ids).logits[0], atol=2e-5, rtol=1e-4)


def test_a_cache_in_pieces_gives_the_logits_of_one_pass(model):
    ids = tokens(2, 13)
    whole = model(ids).logits
    cache, seen = None, 0
    for piece in ids.split([5, 1, 1, 4, 2], 1):
        out = model(piece, past_key_values=cache, use_cache=True)
        start = seen
        cache, seen = out.past_key_values, out.past_key_values.get_seq_length()
        torch.testing.assert_close(out.logits, whole[:, start:seen], atol=2e-5, rtol=1e-4)
    assert seen == 13 and len(cache) == 3


def test_a_copy_of_a_cache_goes_on_independently_and_rows_can_be_chosen(model):
    ids = tokens(2, 7)
    cache = model(ids, use_cache=True).past_key_values
    kept = copy.copy(cache)
    model(tokens(2, 3, seed=5), past_key_values=cache)
    assert (cache.get_seq_length(), kept.get_seq_length()) == (10, 7)
    following = tokens(4, 2, seed=6)
    kept.batch_repeat_interleave(2)
    repeated = model(following, past_key_values=kept).logits
    expected = model(torch.cat([ids.repeat_interleave(2, 0), following], 1)).logits[:, -2:]
    torch.testing.assert_close(repeated, expected, atol=2e-5, rtol=1e-4)
    kept.reset()
    torch.testing.assert_close(model(following, past_key_values=kept).logits, model(following).logits)


def test_saved_and_loaded_bit_for_bit_by_the_auto_classes(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md",
        "config.json",
        "femixer_models.py",
        "generation_config.json",
        "model.safetensors",
    ]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is FEMForCausalLM and type(AutoModel.from_pretrained(tmp_path)) is FEMModel
    saved = model.state_dict()
    assert loaded.state_dict().keys() == saved.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, saved[name]), name
    ids = tokens(2, 7)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()


def test_gradient_checkpointing_changes_no_gradient(model):
    ids = tokens(2, 7)
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert all(torch.isfinite(g).all() and g.any() for g in gradients[0].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_checkpointed_gradients_and_caches():
    """A model in training continues from a cache where no gradient is computed, and refuses it elsewhere."""
    model, ids = build("hybrid"), tokens(2, 9)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    model.train().gradient_checkpointing_enable()
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    for given in ({"use_cache": True}, {"past_key_values": cache}):
        with pytest.raises(ValueError, match="not allowed where gradients are checkpointed"):
            model(ids, **given)
    model(ids, labels=ids).loss.backward()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracing does it
@pytest.mark.parametrize("name", ["softmax", "hybrid"])
def test_compiled_as_one_graph_it_gives_the_same_loss_and_gradients(name):
    model = build(name, num_hidden_layers=2).train()
    ids, segments = tokens(2, 7), torch.tensor([[0] * 3 + [1] * 4, [0] * 5 + [1] * 2])
    losses, gradients = [], []
    for forward in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        loss = forward(ids, segments=segments, labels=ids).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(losses[1], losses[0])
    for compiled, eager in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(compiled, eager, atol=1e-6, rtol=1e-4)


def test_labels_are_shifted_and_minus_100_is_not_scored():
    model, ids = build(), tokens(2, 7)
    labels = ids.clone()
    labels[0, 2:5] = -100
    out = model(ids, labels=labels)
    log_p = out.logits.double().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    scored = labels[:, 1:] != -100
    torch.testing.assert_close(out.loss.double(), -log_p[scored].mean(), atol=1e-6, rtol=1e-5)


def test_only_the_last_logits_when_asked():
    model, ids = build(), tokens(2, 7)
    logits = model(ids).logits
    assert logits.shape == (2, 7, WORDS)
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, logits[:, -2:])
    assert len(model(ids, output_hidden_states=True).hidden_states) == 4


def test_plain_attention_is_llama():
    """The plain transformer of all comparisons is transformers' Llama: same function for the same weights."""
    sizes = {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    theirs = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=40)).eval()
    ours = FEMForCausalLM(FEMConfig(**sizes, intermediate_size=40, mixer="attention")).eval()
    # Llama rotates channel i with channel i + E/2, we rotate neighbours: the same up to an order of the channels.
    order = torch.arange(8).view(2, 4).T.flatten()
    rows = (torch.arange(3)[:, None] * 8 + order).flatten()
    weights = {}
    for name, tensor in theirs.state_dict().items():
        new = name.replace("self_attn.o_proj", "mixer.out_proj").replace("self_attn.v_proj", "mixer.value_proj")
        new = new.replace("input_layernorm", "mixer_norm").replace("post_attention_layernorm", "mlp_norm")
        weights[new] = tensor
    for layer in range(2):
        q, k = (weights.pop(f"model.layers.{layer}.self_attn.{x}_proj.weight")[rows] for x in "qk")
        weights[f"model.layers.{layer}.mixer.query_key_proj.weight"] = torch.cat([q, k])
    ours.load_state_dict(weights)
    ids = tokens(2, 11)
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_of_the_plain_transformer(name):
    """Within 2 %, for every prior, with all parts and with none, and Llama has as many as the plain transformer."""

    config = preset(name, mixer="attention")

    def count(build: Callable[[int], nn.Module]) -> int:
        """All layers are alike, so that models of one and of two tell."""
        with torch.device("meta"):
            one, two = (sum(p.numel() for p in build(layers).parameters()) for layers in (1, 2))
        return one + (config.num_hidden_layers - 1) * (two - one)

    def fem(**options: Any) -> Callable[[int], nn.Module]:
        return lambda layers: FEMForCausalLM(preset(name, num_hidden_layers=layers, **options))

    def llama(layers: int) -> nn.Module:
        fields = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        same = {field: getattr(config, field) for field in fields}
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **same))

    plain = count(fem(mixer="attention"))
    assert plain == count(llama)
    for prior in ("softmax", "linear", "gla", "aft", "decay", "ssm", "mamba", "mamba-interactive"):
        for parts in ("", "CLTG"):
            assert abs(count(fem(prior=prior, parts=parts)) / plain - 1) < 0.02, (prior, parts)


def test_the_large_presets_have_the_papers_sizes():
    for name, low, high in (("340m", 3.4e8, 3.8e8), ("1.3b", 1.3e9, 1.4e9)):
        config = preset(name)
        with torch.device("meta"):
            assert low < FEMForCausalLM(config).num_parameters() < high
        assert (config.vocab_size, config.max_position_embeddings) == (32000, 4096)


def test_mixers_start_as_they_do_outside_a_model(tmp_path):
    """Spread memory spans, beta of 1.95: not the values transformers would give, also where keys are missing."""
    model = text(num_hidden_layers=1, prior="mamba")
    started = FreeEnergyMixer(24, 3, prior="mamba", bias=False)
    mixer = model.model.layers[0].mixer
    for name in ("raw_beta", "prior.rate", "prior.delta_bias", "conditioner.in_proj.bias", "value_proj.modulation"):
        assert torch.equal(mixer.get_parameter(name), started.get_parameter(name)), name
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "model.safetensors")
    gone = "model.layers.0.mixer.prior.rate"
    weights.pop(gone)
    changed = weights["model.layers.0.mixer.prior.delta_bias"].fill_(0.37)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, allow_missing=[gone]).model.layers[0].mixer
    torch.testing.assert_close(loaded.prior.rate, started.prior.rate)
    assert torch.equal(loaded.prior.delta_bias, changed)


def test_tied_embeddings_are_one_tensor_saved_once(tmp_path):
    model = build(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_a_model_in_bfloat16_is_loaded_in_bfloat16(tmp_path):
    model = build().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    how = {"do_sample": False, "max_new_tokens": 7}
    assert torch.equal(loaded.generate(tokens(1, 5), **how), model.generate(tokens(1, 5), **how))


def test_a_pickle_checkpoint_is_refused(tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="use_safetensors=False is not allowed"):
        FEMForCausalLM.from_pretrained(tmp_path, use_safetensors=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prior": "sofmax"}, "prior='sofmax' is unknown"),
        ({"mixer": ["fem", "retnet2"]}, "mixer='retnet2' is unknown; choose one of fem, attention"),
        ({"prior": []}, r"prior=\[\] must be a name"),
        ({"prior_options": {"decay": "channel"}, "prior": "gla"}, "must give options per prior"),
        ({"prior_options": {"aft": {}}}, "its priors are softmax"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 is not allowed"),
        ({"num_hidden_layer": 3}, "num_hidden_layer=3 is not a field of FEMConfig; choose num_hidden_layers"),
        ({"dropout": 0.1}, "dropout=0.1 is not a field of FEMConfig; choose mixer_dropout"),
        ({"n_layer": 2}, "n_layer=2 is not a field of FEMConfig; choose num_hidden_layers"),
        ({"mixer": "attention", "window": 3}, "window=3 does not fit mixer='attention'"),
        ({"prior": ["gla", "aft"], "window": 3}, "window=3 is not allowed; choose None: no layer has"),
        ({"mixer": "mamba", "prior": "gla", "window": 3}, "window=3 is not allowed; choose None: no layer has"),
        ({"mixer": ["fem", "mamba"], "prior": "gla", "window": 3}, "window=3 is not allowed; choose None"),
        ({"prior": "aft", "num_key_value_heads": 1}, "num_key_value_heads=1 is not allowed; choose 8: no layer has"),
        ({"prior": ["aft", "mamba"], "rope": True}, "rope=True is not allowed; choose None: no layer rotates"),
        ({"mixer": "attention", "prior": "gla"}, "prior='gla' is not allowed; choose 'softmax': no layer is a free"),
        ({"mixer": "mamba2", "prior_options": {"softmax": {}}}, "is not allowed; choose None: no layer is"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(fields, message):
    with pytest.raises(Exception, match=message):  # transformers wraps what validation raises
        FEMConfig(**fields)


def test_wrong_inputs_are_refused_by_name():
    model, ids = build(), tokens(2, 7)
    with pytest.raises(ValueError, match="unknown; choose one of tiny"):
        preset("2b")
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    for shape in ((2, 5), (2, 9), (1, 7), (2, 1, 7, 7), (7,)):
        with pytest.raises(ValueError, match=r"attention_mask has shape .*; allowed is \(2, 7\): one"):
            model(ids, attention_mask=torch.ones(shape))
    for value in (-1e9, 2.0):
        with pytest.raises(ValueError, match=f"attention_mask has the value {value}; allowed are 0 and 1"):
            model(ids, attention_mask=torch.full((2, 7), value))
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 10\); allowed is \(2, 7\) or \(2, 14\)"):
        model(ids, attention_mask=torch.ones(2, 10), past_key_values=cache)
    with pytest.raises(TypeError, match="past_key_values must be an FEMCache, not list"):
        model(ids, past_key_values=[])
    with pytest.raises(RuntimeError, match="keep a copy"):
        FEMCache(3).crop(-2)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(ids[:1], assistant_model=build(), do_sample=False)


def test_what_no_layer_uses_may_be_said_in_another_spelling() -> None:
    config = FEMConfig(mixer="mamba", prior=["softmax"], prior_options={})
    assert FEMConfig.from_dict(config.to_dict()).prior == ["softmax"]


@pytest.mark.parametrize("name", ["hybrid", "mamba"])
@pytest.mark.parametrize("how", [{}, {"num_beams": 2}])
def test_a_prompt_read_in_chunks_is_continued_as_one_read_at_once(name, how):
    model, ids, mask = build(name), tokens(2, 13), torch.ones(2, 13, dtype=torch.long)
    mask[0, :6] = 0
    given = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, **how}
    for size in (1, 4, 13, 50):
        assert torch.equal(model.generate(ids, prefill_chunk_size=size, **given), model.generate(ids, **given)), size


@pytest.mark.parametrize("how", [{}, {"prefill_chunk_size": 3}])
def test_a_cache_that_has_read_the_whole_prompt_is_refused(how):
    """transformers would have the prompt read again, behind itself."""
    model, ids, given = build("hybrid"), tokens(2, 9), {"max_new_tokens": 4, "do_sample": False, **how}
    cache = model(ids[:, :6], use_cache=True).past_key_values
    expected = model.generate(ids, **given)
    assert torch.equal(model.generate(ids, past_key_values=copy.copy(cache), **given), expected)
    alone = model.generate(ids[:, 6:], past_key_values=copy.copy(cache), attention_mask=torch.ones_like(ids), **given)
    assert torch.equal(alone[:, 3:], expected[:, 9:])
    for prompt, length in ((ids[:, :6], 6), (ids[:, :4], 4), (ids[:, 6:], 3)):
        with pytest.raises(ValueError, match=f"input_ids has {length} tokens and past_key_values has read 6; allowed"):
            model.generate(prompt, past_key_values=copy.copy(cache), **given)


@pytest.mark.parametrize("kind", ["static", "offloaded", "quantized"])
def test_a_cache_of_another_kind_is_refused(kind):
    with pytest.raises(ValueError, match=f"cache_implementation='{kind}' is not allowed; choose None"):
        build().generate(tokens(1, 5), cache_implementation=kind, max_new_tokens=2)


def test_continuous_batching_is_refused_before_it_begins():
    model = build()
    for ask in (
        lambda: model.generate_batch([[1, 2, 3]]),
        lambda: model.init_continuous_batching(),
        lambda: model.continuous_batching_context_manager(),
        lambda: model.generate(tokens(1, 5), cache_implementation="paged", max_new_tokens=2),
    ):
        with pytest.raises(RuntimeError, match="continuous batching needs keys and values in pages"):
            ask()


def test_a_model_tells_baselines_what_a_layer_cannot_know():
    """Depth, lower bounds that grow with it, the length of the sequences; what mixer_options says comes first."""

    def mixers(name: str, **options: object) -> list[Any]:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 77}
        return [layer.mixer for layer in FEMModel(FEMConfig(mixer=name, mixer_options={name: options}, **sizes)).layers]

    assert [m.lambda_init for m in mixers("diff-transformer")] == pytest.approx([0.2, 0.8 - 0.6 * math.exp(-0.3)])
    assert [m.lower_bound for m in mixers("hgrn2")] == [0.0, 0.5]
    assert [m.filter.length for m in mixers("hyena")] == [77, 77]
    assert [(m.heads, m.lower_bound) for m in mixers("hgrn2", heads=2, lower_bound=0.1)] == [(2, 0.1)] * 2
    with pytest.raises(Exception, match="rope=True does not fit mixer='hgrn2'"):
        FEMConfig(mixer="hgrn2", rope=True)
