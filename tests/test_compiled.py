"""Language models under torch.compile and torch.export: the tokens that generate() gives in eager mode."""

import io
from typing import Any

import pytest
import torch
from small_models import stirred, text, tokens
from torch import Tensor, nn

from femixer.models import FEMCache, FEMForCausalLM
from femixer.trees import any_size

# torch about itself: its tracing, its imports, and what transformers does in a traced call.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning"),
]
MODELS: dict[str, dict[str, Any]] = {
    "hybrid": {"prior": ["gla", "softmax"]},
    "scans": {"prior": ["linear", "gla", "aft", "decay"], "prior_options": {"gla": {"decay": "channel"}}},
    "state spaces": {"prior": ["ssm", "mamba", "mamba-interactive"]},
    "window": {"prior": "softmax", "window": 5},
    "exponentials": {"prior": "softmax", "prior_options": {"softmax": {"cache": "exp"}}},
    "attention": {"mixer": ["attention", "fem"], "prior": "aft"},
}
STEPS = 7


def build(name: str) -> FEMForCausalLM:
    layers = max([len(names) for names in MODELS[name].values() if isinstance(names, list)], default=1)
    return stirred(text(pad_token_id=0, num_hidden_layers=layers, **MODELS[name]))


def check_compiled(name: str, backend: str) -> None:
    """A step of decoding is compiled at most twice: for its first sizes and then for all others."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, ids = build(name), tokens(2, 5)
    expected = model.generate(ids, max_new_tokens=STEPS, do_sample=False)
    model.forward = torch.compile(model.forward, backend=backend)
    assert torch.equal(model.generate(ids, max_new_tokens=STEPS, do_sample=False), expected)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


@pytest.mark.parametrize("name", ["scans", "attention"])
def test_a_compiled_model_generates_from_padded_prompts_without_compiling_every_token(name: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, ids = build(name), tokens(2, 5)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    options = {"attention_mask": mask, "max_new_tokens": STEPS, "do_sample": False}
    expected = model.generate(ids, **options)
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


@pytest.mark.parametrize("name", ["scans", "state spaces", "exponentials", "attention"])
def test_a_compiled_model_generates_what_it_does_in_eager_mode(name):
    check_compiled(name, "aot_eager")


def test_a_model_compiled_by_inductor_generates_what_it_does_in_eager_mode():
    check_compiled("hybrid", "inductor")


@pytest.mark.parametrize("strict", [True, False])
def test_a_model_is_exported_with_a_padding_mask_of_any_size(strict: bool) -> None:
    model, any_one = build("attention"), torch.export.Dim.DYNAMIC

    def padded(batch: int, length: int) -> dict[str, Tensor]:
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[0, :2] = 0
        return {"input_ids": tokens(batch, length), "attention_mask": mask}

    sizes = {"input_ids": {0: any_one, 1: any_one}, "attention_mask": {0: any_one, 1: any_one}, "use_cache": None}
    given = {**padded(3, 9), "use_cache": False}
    program = torch.export.export(model, (), given, dynamic_shapes=sizes, strict=strict).module()
    other = padded(2, 13)
    expected = model(**other, use_cache=False).logits
    torch.testing.assert_close(program(**other, use_cache=False).logits, expected, rtol=0, atol=1e-5)


class Prefill(nn.Module):
    def __init__(self, model: FEMForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> tuple[Tensor, FEMCache]:
        outputs = self.model(ids, use_cache=True)
        return outputs.logits, outputs.past_key_values


class Decode(Prefill):
    def forward(self, ids: Tensor, cache: FEMCache) -> tuple[Tensor, FEMCache]:  # type: ignore[override]
        outputs = self.model(ids, past_key_values=cache, use_cache=True)
        return outputs.logits, outputs.past_key_values


def exported(model: FEMForCausalLM, strict: bool) -> list[torch.export.ExportedProgram]:
    """Prefill and decoding, of any batch and length, from examples of other sizes than they are used with."""
    any_one = torch.export.Dim.DYNAMIC
    cache = model(tokens(3, 11), use_cache=True).past_key_values
    sizes = {"ids": {0: any_one, 1: any_one}}, {"ids": {0: any_one}, "cache": any_size(cache)}
    examples = (tokens(3, 70),), (tokens(3, 1), cache)
    programs = zip((Prefill(model), Decode(model)), examples, sizes, strict=True)
    return [torch.export.export(m, x, dynamic_shapes=shapes, strict=strict) for m, x, shapes in programs]


def decoded(prefill: Any, decode: Any, ids: Tensor) -> Tensor:
    logits, cache = prefill(ids)
    for _ in range(STEPS):
        following = logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, following], 1)
        logits, cache = decode(following, cache)
    return ids


@torch.no_grad()
@pytest.mark.parametrize(("name", "strict"), [("hybrid", True), ("scans", False), ("state spaces", False)])
def test_exported_programs_for_any_length_decode_what_generate_gives(name, strict):
    model, ids = build(name), tokens(2, 5)
    expected = model.generate(ids, max_new_tokens=STEPS, do_sample=False)
    prefill, decode = exported(model, strict)
    assert torch.equal(decoded(prefill.module(), decode.module(), ids), expected)


@torch.no_grad()
def test_exported_programs_are_saved_and_loaded():
    model, ids = build("window"), tokens(2, 5)
    expected = model.generate(ids, max_new_tokens=STEPS, do_sample=False)
    loaded = []
    for program in exported(model, strict=False):
        program.example_inputs = None  # which would be saved as a pickle
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded.append(torch.export.load(file).module())
    assert torch.equal(decoded(*loaded, ids), expected)
