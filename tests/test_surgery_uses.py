"""Upgraded models saved, loaded, trained, compiled, and the command that makes them."""

import copy
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from surgery_models import TEXT, build, inputs, upgraded
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from femixer.cli import main
from femixer.surgery import load, upgrade
from femixer.surgery.attention import Bounded, fem_attention
from femixer.surgery.families import FAMILIES


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")


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


@pytest.mark.parametrize("name", FAMILIES)
def test_an_upgraded_model_has_no_weights_to_give_out(name: str) -> None:
    model, given = upgraded(name), inputs(name)
    for asked in (model, model.base_model):
        with pytest.raises(ValueError, match="output_attentions=True is not possible after an upgrade"):
            asked(**given, output_attentions=True)


def test_what_an_upgraded_model_cannot_do_is_an_error_and_not_another_result() -> None:
    model = upgraded("llama")
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        model.set_attn_implementation("sdpa")
    x = torch.randn(1, 6, 5, 6)
    with pytest.raises(ValueError, match="softcap"):
        fem_attention(model.model.layers[0].self_attn, x, x, x, None, fem_states=torch.randn(1, 5, 36), softcap=50.0)


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
