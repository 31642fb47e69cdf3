"""Properties of the vision models: encoders over patches, whatever the prior; images of any size; maps of patches."""

import itertools
from copy import deepcopy

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

from femixer.models import FEMForImageClassification, FEMVisionConfig, FEMVisionModel, preset
from femixer.models.images import patch_maps
from femixer.models.named import NAMED, parameter_count
from femixer.models.vision import StochasticDepth, rising
from femixer.rotary import Grid, Rotation, on_grid, rotated
from femixer.timm import timm_attention

PATCH, CHANNELS = 2, 3
PRIORS = {
    "softmax": {"prior": "softmax"},
    "linear": {"prior": "linear"},
    "gla": {"prior": "gla"},
    "gla-channel": {"prior": "gla", "prior_options": {"gla": {"decay": "channel"}}},
    "aft": {"prior": "aft"},
    "decay": {"prior": "decay"},
    "ssm": {"prior": "ssm"},
    "mamba": {"prior": "mamba"},
    "mamba-interactive": {"prior": "mamba-interactive"},
    "mean": {"prior": "softmax", "parts": ""},
    "attention": {"mixer": "attention"},
}
ROTARY = {name: PRIORS[name] for name in ("softmax", "linear", "gla", "attention")}


def make(model=FEMForImageClassification, **fields):
    """A tiny model of 5 x 5 patches in training, whose weights are large enough to matter."""
    torch.manual_seed(fields.pop("seed", 0))
    size = {"image_size": 5 * PATCH, "patch_size": PATCH, "hidden_size": 16, "num_attention_heads": 2}
    made = model(FEMVisionConfig(**{**size, "num_hidden_layers": 2, "num_labels": 7, **fields}))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) if parameter.dim() > 1 else 0)
    return made.eval()


def images(batch=3, rows=3, columns=5, seed=1):
    torch.manual_seed(seed)
    return torch.randn(batch, CHANNELS, rows * PATCH, columns * PATCH)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own doing
def test_compiled_models_are_the_models():
    x = images()
    for fields in (PRIORS["attention"], PRIORS["softmax"], {**PRIORS["softmax"], "positions": "rotary"}):
        model = make(**fields)
        logits = torch.compile(model, backend="aot_eager")(x).logits
        torch.testing.assert_close(logits, model(x).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", ["token", "mean"])
@pytest.mark.parametrize("name", PRIORS)
def test_images_of_a_batch_do_not_see_each_other(name, pooling):
    model, x = make(**PRIORS[name], pooling=pooling), images()
    together = model(x)
    assert together.logits.shape == (3, 7)
    alone = torch.cat([model(image[None]).logits for image in x])
    torch.testing.assert_close(together.logits, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PRIORS)
def test_every_patch_reaches_the_class_token_through_the_mixers(name):
    model, x = make(FEMVisionModel, **PRIORS[name], num_hidden_layers=1), images(1)
    x.requires_grad_()
    model(x).pooler_output.backward(torch.randn(1, 16))
    strength = x.grad.abs().amax(1).unflatten(1, (-1, PATCH)).unflatten(3, (-1, PATCH)).amax((2, 4))
    assert strength.shape == (1, 3, 5) and strength.min() > 1e-7


@pytest.mark.parametrize("name", PRIORS)
def test_an_image_of_one_patch_is_read_whole(name):
    model, x = make(FEMVisionModel, **PRIORS[name], pooling="mean", image_size=PATCH), images(1, 1, 1)
    seen = model(x)
    assert seen.last_hidden_state.shape == (1, 1, 16) and seen.pooler_output.isfinite().all()
    if name != "attention":
        maps = patch_maps(model, x)
        torch.testing.assert_close(maps.read, torch.ones_like(maps.read))


@pytest.mark.parametrize("name", ["softmax", "linear", "mean", "attention"])
def test_without_positions_the_class_token_does_not_know_the_order_of_the_patches(name):
    options = PRIORS[name] if name in ("mean", "attention") else {**PRIORS[name], "parts": "LTG"}
    model, tokens = make(FEMVisionModel, **options), images(2)
    model.embedding.positions.data.zero_()
    patches = tokens.unflatten(2, (-1, PATCH)).unflatten(4, (-1, PATCH)).permute(2, 4, 0, 1, 3, 5).flatten(0, 1)
    shuffled = patches[torch.randperm(15)].unflatten(0, (3, 5)).permute(2, 3, 0, 4, 1, 5).flatten(4, 5).flatten(2, 3)
    torch.testing.assert_close(model(shuffled).pooler_output, model(tokens).pooler_output, rtol=1e-4, atol=1e-5)
    model.embedding.positions.data.normal_()
    assert not torch.allclose(model(shuffled).pooler_output, model(tokens).pooler_output, atol=1e-3)


def test_the_model_is_deit_s():
    """Written out with torch's own layers: conv, class token, positions, pre-norm blocks, norm, classifier."""
    model, x = make(mixer="attention"), images(2, 5, 5)
    vision = model.model
    patches = torch.nn.functional.conv2d(
        x, vision.embedding.projection.weight, vision.embedding.projection.bias, stride=PATCH
    )
    tokens = torch.cat([vision.embedding.class_token.expand(2, 1, 16), patches.flatten(2).mT], 1)
    tokens = tokens + vision.embedding.positions
    for block in vision.layers:
        normed = nn.functional.layer_norm(tokens, (16,), block.mixer_norm.weight, block.mixer_norm.bias, 1e-6)
        q, k = block.mixer.query_key_proj(normed).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        v = block.mixer.value_proj(normed).unflatten(-1, (2, 8)).transpose(1, 2)
        read = ((q @ k.mT) / 8**0.5).softmax(-1) @ v
        tokens = tokens + block.mixer.out_proj(read.transpose(1, 2).flatten(2))
        normed = nn.functional.layer_norm(tokens, (16,), block.mlp_norm.weight, block.mlp_norm.bias, 1e-6)
        tokens = tokens + block.mlp.down(nn.functional.gelu(block.mlp.up(normed)))
    expected = model.classifier(vision.norm(tokens)[:, 0])
    torch.testing.assert_close(model(x).logits, expected, rtol=1e-4, atol=1e-5)
    output = vision(x, output_hidden_states=True)
    assert len(output.hidden_states) == 3 and output.last_hidden_state.shape == (2, 26, 16)


@pytest.mark.parametrize(("name", "attention", "fem"), [("deit-tiny", 5.7e6, 5.8e6), ("deit-small", 22.0e6, 22.3e6)])
def test_presets_have_the_papers_numbers_of_parameters(name, attention, fem):
    for row, count in {"SMAttn": attention, "FEM-SM": fem, "FEM-GLA": fem, "GLA": attention}.items():
        assert parameter_count(preset(name, **NAMED[row])) == pytest.approx(count, rel=0.01)
    assert preset(name).intermediate_size == 4 * preset(name).hidden_size


def test_the_preset_for_digits_reads_them_and_other_presets_stay_what_they_were():
    config = preset("digits", drop_path=0.1, num_hidden_layers=1)
    assert isinstance(config, FEMVisionConfig) and config.drop_path == 0.1
    assert FEMForImageClassification(config)(torch.rand(5, 1, 8, 8)).logits.shape == (5, 10)
    assert preset("tiny").model_type == "fem"
    with pytest.raises(ValueError, match=r"preset='deit-large' is unknown.*deit-tiny"):
        preset("deit-large")


def test_learned_positions_are_interpolated_but_not_the_class_tokens():
    embedding = make(FEMVisionModel).embedding
    with torch.no_grad():
        embedding.positions[:, 1:] = torch.arange(5.0).repeat_interleave(5)[None, :, None]  # the row
    stretched = embedding.positions_for(Grid(11, 3))
    assert stretched.shape == (1, 34, 16)
    assert torch.equal(stretched[:, 0], embedding.positions[:, 0])
    rows = stretched[0, 1:].unflatten(0, (11, 3))
    torch.testing.assert_close(rows, rows[:, :1, :1].expand_as(rows))
    torch.testing.assert_close(rows[5, 0, 0], torch.tensor(2.0))
    assert (rows[1:, 0, 0] > rows[:-1, 0, 0]).all()
    assert embedding.positions_for(Grid(5, 5)) is embedding.positions


def test_rotary_positions_rotate_half_of_the_pairs_by_rows_and_half_by_columns():
    """Token t of a 2 x 3 grid behind two tokens in front; pair i of 2 per axis rotates by base^(-i/2) per step."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 8, 16, dtype=torch.float64), torch.randn(1, 8, 8, dtype=torch.float64)
    with on_grid(Grid(2, 3)):
        found = rotated(q, k, Rotation(torch.arange(8)[None], 8, 100.0), torch.float64)
    for given, heads in zip((q, k), found, strict=True):
        numbers = torch.view_as_complex(given.view(8, -1, 4, 2))
        for token, (row, column) in enumerate([(0, 0), (0, 0), *itertools.product(range(2), range(3))]):
            angle = torch.tensor([row, row / 10, column, column / 10], dtype=torch.float64)
            expected = torch.view_as_real(numbers[token] * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
            torch.testing.assert_close(heads[0, token], expected)
    torch.testing.assert_close(rotated(q, k, Rotation(torch.zeros(1, 8), 8, 100.0), torch.float64)[0].flatten(2), q)


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_models_see_where_a_patch_is_at_any_size_and_under_checkpointing(name):
    model = make(**ROTARY[name], positions="rotary")
    assert model.model.embedding.positions is None
    square = images(2, 3, 3)
    assert not torch.allclose(model(square).logits, model(square.flip(2)).logits, atol=1e-4)
    assert not torch.allclose(model(square).logits, model(square.mT).logits, atol=1e-4)
    x, other = images(2, 3, 5), images(2, 5, 3)
    losses = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train().zero_grad()
        loss = model(x).logits.pow(2).sum()
        model(other)  # an image of another shape between forward and backward
        loss.backward()
        losses.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(losses[0], losses[1])


@pytest.mark.parametrize("options", [{"parts": "LTG"}, {"mixer": "attention"}])
def test_rotary_positions_treat_rows_as_columns(options):
    """Turning over the image, the patches' embedding and the two halves of queries and keys changes nothing."""
    model, x = make(**options, positions="rotary"), images(2)
    before = model(x).logits
    with torch.no_grad():
        model.model.embedding.projection.weight.copy_(model.model.embedding.projection.weight.mT.clone())
        for block in model.model.layers:
            linear = getattr(block.mixer, "query_key_proj", None) or block.mixer.prior_proj.linear
            for parameter in linear.parameters():
                parameter.copy_(parameter.unflatten(0, (-1, 2, 4)).flip(1).flatten(0, 2))
    torch.testing.assert_close(model(x.mT).logits, before, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(x).logits, before, atol=1e-4)


def test_the_loss_is_cross_entropy_of_classes_or_of_soft_targets():
    model, x = make(), images()
    labels = torch.tensor([6, 0, 3])
    expected = -model(x).logits.log_softmax(-1)[torch.arange(3), labels].mean()
    torch.testing.assert_close(model(x, labels=labels).loss, expected)
    hard = nn.functional.one_hot(labels, 7).float()
    torch.testing.assert_close(model(x, labels=hard).loss, expected)
    soft = 0.3 * hard + 0.7 * hard.roll(1, 0)
    torch.testing.assert_close(model(x, labels=soft).loss, -(soft * model(x).logits.log_softmax(-1)).sum(-1).mean())


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 7, 1]), "labels has 7; allowed is 0 to num_labels - 1 = 6"),
        (torch.tensor([0, -1, 1]), "labels has -1"),
        (torch.tensor([0, 1]), r"labels has shape \(2,\).*\[3\]"),
        (torch.rand(3, 5), r"labels has shape \(3, 5\).*\(3, 7\)"),
    ],
)
def test_labels_that_do_not_fit_are_named(labels, message):
    with pytest.raises(ValueError, match=message):
        make()(images(), labels=labels)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 6, 10), r"\(3, 6, 10\); allowed is \[images, 3, height, width\]"),
        ((2, 1, 6, 10), r"\(2, 1, 6, 10\)"),
        ((0, 3, 6, 10), "at least one image"),
        ((2, 3, 7, 10), "height 7, which is no multiple of patch_size=2: the image must be resized or padded"),
        ((2, 3, 6, 5), "width 5"),
        ((2, 3, 0, 4), "height 0"),
    ],
)
def test_images_that_do_not_fit_are_named(shape, message):
    with pytest.raises(ValueError, match=message):
        make()(torch.zeros(shape))


def test_pixels_are_numbers():
    with pytest.raises(TypeError, match=r"pixel_values must be a floating-point tensor, not torch.uint8"):
        make()(torch.zeros(1, 3, 6, 6, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": 9}, "image_size=9.*multiple of patch_size=2"),
        ({"patch_size": 0}, "patch_size=0"),
        ({"num_channels": 0}, "num_channels=0"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"pooling": "max"}, "pooling='max'.*token, mean"),
        ({"positions": "sine"}, "positions='sine'.*learned, rotary"),
        ({"positions": "rotary", "prior": "aft"}, "positions='rotary' does not fit prior='aft'"),
        ({"positions": "rotary", "prior": ["gla", "ssm"]}, "does not fit prior='ssm'"),
        ({"positions": "rotary", "hidden_size": 12}, "hidden_size=12.*multiple of 8"),
        ({"mixer": "hyena"}, "mixer='hyena'.*fem, attention"),
        ({"mixer": "atention"}, "mixer='atention'"),
        ({"prior": "sofmax"}, "prior='sofmax'"),
        ({"drop_path": 1.0}, "drop_path=1.0"),
        ({"dropout": -0.1}, "dropout=-0.1"),
    ],
)
def test_configurations_that_cannot_be_are_named(fields, message):
    with pytest.raises(StrictDataclassError) as error:
        make(**fields)
    with pytest.raises(ValueError, match=message):
        raise error.value.__cause__


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_saved_and_loaded_the_model_gives_the_same_bits(positions, tmp_path):
    names = dict(enumerate("abcdefg"))
    model, x = make(prior=["gla", "softmax"], positions=positions, id2label=names), images()
    model.save_pretrained(tmp_path)
    assert not [*tmp_path.glob("*.bin")] and (tmp_path / "model.safetensors").exists()
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert type(loaded) is FEMForImageClassification and loaded.config.id2label == names
    assert torch.equal(loaded(x).logits, model(x).logits)
    vision = AutoModel.from_pretrained(tmp_path).eval()
    assert type(vision) is FEMVisionModel and type(AutoConfig.from_pretrained(tmp_path)) is FEMVisionConfig
    assert torch.equal(vision(x).pooler_output, model.model(x).pooler_output)
    with pytest.raises(ValueError, match="use_safetensors=False"):
        FEMForImageClassification.from_pretrained(tmp_path, use_safetensors=False)


def test_stochastic_depth_skips_whole_images_and_keeps_the_mean():
    assert rising(0.3, 4) == pytest.approx([0, 0.1, 0.2, 0.3]) and rising(0.3, 1) == [0]
    torch.manual_seed(0)
    drop, x = StochasticDepth(0.25), torch.ones(4001, 3, 2)
    y = drop(x)
    assert y.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(y, y[:, :1, :1].expand_as(y)) and y.mean() == pytest.approx(1, abs=0.03)
    assert drop.eval()(x) is x
    model = make(drop_path=0.6, num_hidden_layers=3)
    assert [block.drop[1].skipped for block in model.model.layers] == pytest.approx([0, 0.3, 0.6])
    same = make(drop_path=0.6, num_hidden_layers=3).train()
    assert torch.equal(model(images()).logits, same.eval()(images()).logits)
    assert not torch.equal(same.train()(images()).logits, model(images()).logits)


@pytest.mark.parametrize("pooling", ["token", "mean"])
@pytest.mark.parametrize("name", ["softmax", "gla", "aft", "mamba-interactive", "mean"])
def test_patch_maps_are_what_the_mixer_inspects(name, pooling):
    model, x = make(**PRIORS[name], pooling=pooling).train(), images(2)
    maps = patch_maps(model, x, layer=1)
    assert model.training
    block = model.eval().model.layers[1]
    seen = block.mixer.inspect(block.mixer_norm(model.model(x, output_hidden_states=True).hidden_states[1]))
    first = int(pooling == "token")
    queries = slice(0, 1) if pooling == "token" else slice(None)
    for found, weights in ((maps.posterior, seen.posterior), (maps.prior, seen.prior)):
        weights = weights[:, :, queries].mean(2)
        weights = weights if weights.dim() == 3 else weights.mT
        torch.testing.assert_close(found.flatten(-2).float(), weights[..., first:], rtol=1e-3, atol=1e-5)
        own = weights[..., :first].sum(-1)
        torch.testing.assert_close(found.sum((-2, -1)).float() + own, torch.ones_like(own))
    assert maps.read.shape == maps.posterior.shape and (name == "mean" or not torch.equal(maps.read, maps.posterior))


def test_patch_maps_find_the_patch_that_a_channel_looks_for():
    """Uniform prior; the value of channel c of head h is the brightness of colour c, so at a high temperature channel c
    reads the one patch that has this colour and the prior all of them alike."""
    model = make(FEMVisionModel, parts="LT", num_hidden_layers=1)
    block, embedding = model.layers[0], model.embedding
    with torch.no_grad():
        for parameter in (*embedding.parameters(), *block.mixer.prior_proj.parameters()):
            parameter.zero_()
        embedding.projection.weight[:CHANNELS] = torch.eye(CHANNELS)[:, :, None, None]
        block.mixer.value_proj.linear.weight.zero_()
        block.mixer.value_proj.linear.bias.fill_(20.0)  # lam = 1
        width = block.mixer.widths.value
        for head in range(2):
            block.mixer.value_proj.linear.weight[head * width : head * width + CHANNELS, :CHANNELS] = torch.eye(
                CHANNELS
            )
        block.mixer.raw_beta.fill_(30.0)
    x = torch.zeros(2, CHANNELS, 3 * PATCH, 5 * PATCH)
    places = {0: (2, 4), 1: (0, 3), 2: (1, 0)}
    for channel, (row, column) in places.items():
        x[:, channel, PATCH * row, PATCH * column] = 1.0
        x[:, channel, PATCH * row + 1, PATCH * column + 1] = 1.0
    maps = patch_maps(model, x)
    torch.testing.assert_close(maps.prior, torch.full_like(maps.prior, 1 / 16))
    for channel, (row, column) in places.items():
        assert (maps.posterior[:, :, channel, row, column] > 0.999).all()
        assert (maps.read[:, :, channel, row, column] > 0.999).all()


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({}, {"layer": 2}, "layer=2.*-2 to 1"),
        ({}, {"query": "patch"}, "query='patch'.*token, mean"),
        ({"pooling": "mean"}, {"query": "token"}, "query='token'.*choose one of mean"),
        ({"mixer": "attention"}, {}, "mixer=Attention, which cannot be inspected"),
    ],
)
def test_maps_that_cannot_be_made_are_named(fields, arguments, message):
    with pytest.raises(ValueError, match=message):
        patch_maps(make(**fields), images(), **arguments)


def test_patch_maps_know_rotary_positions_and_leave_the_order_of_layers():
    model, x = make(positions="rotary"), images(1)
    last = patch_maps(model, x)
    assert torch.equal(last.prior, patch_maps(model, x, layer=1).prior)
    assert not torch.allclose(last.prior, patch_maps(model, x, layer=-2).prior)
    turned = model.model.layers[0].mixer.prior
    assert turned.rope
    before = patch_maps(model, x, layer=0).prior
    turned.rope = False
    assert not torch.allclose(before, patch_maps(model, x, layer=0).prior)


class TimmBlock(nn.Module):
    """The attention half of timm's Block: how it makes its attention and how it calls it."""

    def __init__(self, dim, num_heads, attn_layer, device=None, dtype=None, **options):
        super().__init__()
        given = {"qkv_bias": True, "qk_norm": False, "scale_norm": False, "proj_bias": True, "attn_drop": 0.0}
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attn_layer(
            dim, num_heads=num_heads, **{**given, "proj_drop": 0.0, "norm_layer": nn.LayerNorm, **options},
            device=device, dtype=dtype,
        )  # fmt: skip

    def forward(self, x, attn_mask=None, is_causal=False):
        return x + self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)


@pytest.mark.parametrize("prior", ["softmax", "gla", "aft"])
def test_a_timm_block_runs_with_fem_and_its_padding_does_not_matter(prior):
    torch.manual_seed(0)
    block = TimmBlock(12, 3, timm_attention(prior), dtype=torch.float64).double()
    x, keep = torch.randn(2, 7, 12, dtype=torch.float64), torch.ones(2, 7, dtype=torch.bool)
    assert block(x).shape == x.shape and not block.attn.mixer.causal
    keep[1, 4:] = False
    short = block(x[1:, :4])
    for mask in (keep, keep[:, None, None]):
        torch.testing.assert_close(block(x, attn_mask=mask)[1:, :4], short)
    torch.testing.assert_close(block(x, attn_mask=keep)[:1], block(x[:1]))


def test_timm_s_starting_values_do_not_overwrite_what_fem_needs():
    """timm sets every linear map anew, children first, and then calls init_weights of what has one."""
    attention = timm_attention(parts="CLTG")(16, 2, qkv_bias=True)
    fresh = deepcopy(attention)
    for module in attention.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    attention.init_weights()
    spans, wanted = (a.mixer.conditioner.in_proj.bias for a in (attention, fresh))
    assert torch.equal(spans, wanted) and spans.any()
    assert all(p.std() > 0 for name, p in attention.named_parameters() if name.endswith("linear.weight"))


@pytest.mark.parametrize("biases", [(a, b) for a in (True, False) for b in (True, False)])
def test_timm_s_biases_are_where_it_wants_them(biases):
    attention = timm_attention(parts="LTG")(16, 2, qkv_bias=biases[0], proj_bias=biases[1])
    mixer = attention.mixer
    assert (mixer.value_proj.linear.bias is not None, mixer.out_proj.bias is not None) == biases


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: timm_attention("sofmax"), "prior='sofmax'"),
        (lambda: timm_attention(causal=True), "causal=True.*timm gives it"),
        (lambda: timm_attention()(16, 2, qk_norm=True), "qk_norm=True"),
        (lambda: timm_attention()(16, 2, dim_out=8), "dim_out=8"),
        (lambda: timm_attention()(16, 2, attn_head_dim=4), "attn_head_dim=4"),
        (lambda: timm_attention()(16, 2)(torch.zeros(1, 3, 16), is_causal=True), "is_causal=True"),
        (lambda: timm_attention()(16, 2)(torch.zeros(1, 3, 16), torch.zeros(1, 3)), "attn_mask is torch.float32"),
        (
            lambda: timm_attention()(16, 2)(torch.zeros(2, 3, 16), torch.ones(3, 3, dtype=torch.bool)),
            r"\(3, 3\); allowed is bool \[2, 3\]",
        ),
    ],
)
def test_what_timm_may_ask_and_fem_cannot_is_named(make_it, message):
    with pytest.raises(ValueError, match=message):
        make_it()


def test_timm_s_own_vision_transformer_takes_fem():
    models = pytest.importorskip("timm.models", reason="timm needs torchvision, which has no matching build")
    model = models.VisionTransformer(
        img_size=10, patch_size=2, embed_dim=12, depth=2, num_heads=3, num_classes=7, attn_layer=timm_attention("gla")
    )
    assert model(images(2, 5, 5)).shape == (2, 7)


def test_several_classes_of_one_image():
    config = FEMVisionConfig(image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    config.num_labels, config.problem_type = 3, "multi_label_classification"
    model, labels = FEMForImageClassification(config), torch.tensor([[1, 1, 0], [0, 0, 0]])
    output = model(torch.randn(2, 3, 8, 8), labels=labels)
    p = output.logits.sigmoid()
    expected = -torch.where(labels > 0, p.log(), (1 - p).log()).mean()
    torch.testing.assert_close(output.loss, expected)


@pytest.mark.parametrize(("name", "value"), [("image_size", "224"), ("image_size", (32, 48)), ("num_channels", 3.0)])
def test_sizes_that_are_no_numbers_are_named(name, value):
    with pytest.raises((StrictDataclassError, TypeError, ValueError), match=name):
        FEMVisionConfig(**{name: value})
    with pytest.raises((StrictDataclassError, ValueError), match="problem_type"):
        FEMVisionConfig(problem_type="ranking")
