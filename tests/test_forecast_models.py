"""Forecasters: what they read of a window, what missing values may not do, and rivals by hand."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from forecasters import CHANNELS, HORIZON, LOOKBACK, MIXERS, gaps, make, walks
from torch import nn

from femixer.models import FEMForecaster
from femixer.models.forecast import FORECASTERS, KINDS, DLinear, ForecastConfig, Forecaster, SeasonalNaive
from femixer.models.forecast.forecaster import Dropout
from femixer.models.named import NAMED
from femixer.priors import PRIORS


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Forecaster:
    return make(request.param)


# --- what FEMForecaster reads ------------------------------------------------------------------------------------


def test_patches_and_tokens_are_those_of_the_protocol_read_point_by_point():
    model, window = make(), walks(2).double()
    model.double()
    patches = model.patched(window, None)
    tokens = model.tokens(patches.values).detach().numpy()
    x, p = window.numpy(), {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    count = math.ceil(LOOKBACK / HORIZON)
    z = np.zeros((2, CHANNELS, count * HORIZON))
    for b in range(2):
        for c in range(CHANNELS):
            mean, std = x[b, -HORIZON:, c].mean(), x[b, :, c].std(ddof=1)
            z[b, c, count * HORIZON - LOOKBACK :] = (x[b, :, c] - mean) / (std + 1e-8)
    z = z.reshape(2, CHANNELS, count, HORIZON)
    np.testing.assert_allclose(patches.values.numpy(), z, rtol=1e-12, atol=1e-12)

    def rms_norm(t: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return t / np.sqrt((t**2).mean() + 1e-5) * weight

    for b in range(2):
        for c in range(CHANNELS):
            for n in range(count):
                mixed = sum(p["across.weight"][c, i] * z[b, i, n] for i in range(CHANNELS)) + p["across.bias"][c]
                context = p["context_embedding.weight"] @ mixed + p["context_embedding.bias"]
                own = p["own_embedding.weight"] @ z[b, c, n] + p["own_embedding.bias"]
                np.testing.assert_allclose(tokens[b, c, 2 * n], rms_norm(context, p["context_norm.weight"]), rtol=1e-9)
                np.testing.assert_allclose(tokens[b, c, 2 * n + 1], rms_norm(own, p["own_norm.weight"]), rtol=1e-9)


def test_the_stack_reads_own_tokens_of_every_channel_alone_and_the_last_is_the_forecast():
    model, window = make().double(), walks(2).double()
    patches = model.patched(window, None)
    tokens, count = model.tokens(patches.values), model.patches
    place = model.channel_positions.weight.view(CHANNELS, 2 * count, -1) + model.positions.weight
    for c in range(CHANNELS):
        x = model.input_norm(tokens[:, c] + place[c])
        for layer in model.layers:
            x = x + layer.mixer(layer.mixer_norm(x))
            x = x + layer.mlp.down(nn.functional.gelu(layer.mlp.up(layer.mlp_norm(x))))
        outputs = model.head(model.output_norm(x))[:, 1::2]
        torch.testing.assert_close(model.outputs(patches)[:, c], outputs)
        scale, shift = window[..., c].std(1) + 1e-8, window[:, -HORIZON:, c].mean(1)
        torch.testing.assert_close(model(window)[..., c], outputs[:, -1] * scale[:, None] + shift[:, None])


@pytest.mark.parametrize("mixer", MIXERS)
def test_an_output_does_not_depend_on_later_patches(mixer):
    model = make(**MIXERS[mixer])
    patches = model.patched(walks(), None)
    before = model.outputs(patches)
    for seen in (1, 4):
        values = patches.values.clone()
        values[:, :, seen:] *= -100
        after = model.outputs(patches._replace(values=values))
        torch.testing.assert_close(after[:, :, :seen], before[:, :, :seen], atol=1e-5, rtol=1e-5)
        assert (after[:, :, seen] - before[:, :, seen]).abs().max() > 1e-3


def test_losses_are_sums_over_windows_of_the_squared_errors_of_forecast_and_next_patches():
    model, history, future = make(), walks(), walks(length=HORIZON, seed=3)
    losses = model(history, future=future)
    assert losses.keys() == {"loss", "next_patch"}
    torch.testing.assert_close(losses["loss"], 5 * (model(history) - future).square().mean())
    patches = model.patched(history, None)
    error = model.outputs(patches)[:, :, :-1] - patches.values[:, :, 1:]
    torch.testing.assert_close(losses["next_patch"], 5 * error.square().mean())
    assert make(lookback=HORIZON)(history, future=future).keys() == {"loss"}


def test_next_patches_are_scored_at_observed_points_after_a_patch_that_has_any():
    model, history, observed = make(), walks(), gaps((5, LOOKBACK, CHANNELS))
    patches = model.patched(history.masked_fill(~observed, 0), observed)
    outputs, total = model.outputs(patches), 0.0
    for b in range(5):
        errors = []
        for c in range(CHANNELS):
            for t in range(LOOKBACK):
                n, i = divmod(t + 1, HORIZON)
                before = observed[b, max((n - 1) * HORIZON - 1, 0) : n * HORIZON - 1, c]
                if n > 0 and observed[b, t, c] and before.any():
                    errors.append((outputs[b, c, n - 1, i] - patches.values[b, c, n, i]).square())
        total = total + sum(errors) / max(len(errors), 1)
    torch.testing.assert_close(model(history, observed, walks(length=HORIZON))["next_patch"], total)


def test_missing_points_of_the_future_and_of_the_history_are_not_scored(model):
    history, future = walks(), walks(length=HORIZON, seed=3)
    observed, future_observed = gaps(history.shape), gaps(future.shape, seed=4)
    future_observed[4] = False
    expected = model(history, observed, future, future_observed)
    error = (model(history, observed) - future).square() * future_observed
    by_hand = error.flatten(1).sum(1) / future_observed.flatten(1).sum(1).clamp_min(1)
    torch.testing.assert_close(expected["loss"], by_hand.sum())
    parts = [model(*(x[rows] for x in (history, observed, future, future_observed))) for rows in ([0, 3], [1, 2, 4])]
    for name in expected:
        torch.testing.assert_close(parts[0][name] + parts[1][name], expected[name])
    if not model.trainable:
        return
    gradients = []
    for garbage in (0.0, math.nan):
        model.zero_grad()
        given = (history.masked_fill(~observed, garbage), observed, future.masked_fill(~future_observed, garbage))
        sum(model(*given, future_observed).values()).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(*pair) and pair[0].isfinite().all() for pair in zip(*gradients, strict=True))


# --- every forecaster --------------------------------------------------------------------------------------------


def test_windows_of_a_batch_do_not_see_each_other(model):
    history, observed = walks(), gaps((5, LOOKBACK, CHANNELS))
    order = torch.tensor([3, 0, 4, 1, 2])
    for seen in (None, observed):
        forecast = model(history, seen)
        shuffled = model(history[order], None if seen is None else seen[order])
        torch.testing.assert_close(shuffled, forecast[order])


def test_what_stands_at_unobserved_places_does_not_matter(model):
    history, observed = walks(), gaps((5, LOOKBACK, CHANNELS))
    forecast = model(history, observed)
    assert forecast.isfinite().all()
    for garbage in (math.nan, math.inf, -1e30, 7.0):
        assert torch.equal(model(history.masked_fill(~observed, garbage), observed), forecast)
    assert not torch.allclose(model(history), forecast)
    assert torch.equal(model(history, torch.ones_like(observed)), model(history))


def test_a_short_history_is_unobserved_on_the_left_and_a_long_one_is_cut(model):
    history = walks(length=LOOKBACK + 6)
    assert torch.equal(model(history), model(history[:, 6:]))
    for length in (LOOKBACK - 1, 20, 5, 1, 0):
        observed = torch.zeros(5, LOOKBACK, CHANNELS, dtype=torch.bool)
        observed[:, LOOKBACK - length :] = True
        short = model(history[:, history.shape[1] - length :])
        assert short.isfinite().all()
        assert torch.equal(short, model(history[:, 6:], observed))


def test_a_token_without_observed_points_is_padding_but_the_last_is_read():
    model, history = make(), walks(2)
    observed = torch.ones_like(history, dtype=torch.bool)
    observed[:, :13] = False  # the first two patches
    full = model(history, observed)
    tail = make(lookback=4 * HORIZON)
    places = [2 * c * model.patches + 4 + i for c in range(CHANNELS) for i in range(8)]
    for (name, target), source in zip(tail.state_dict().items(), model.state_dict().values(), strict=True):
        rows = places if name.startswith("channel_positions") else range(4, 12)
        target.copy_(source[[*rows]] if name.endswith("positions.weight") else source)
    torch.testing.assert_close(tail(history, observed), full, atol=1e-5, rtol=1e-5)
    observed[:, -HORIZON:, 0] = False
    other = history.clone()
    other[..., 1] *= -1  # channel 0 knows of it through context tokens only, and through its last token only of those
    assert (model(other, observed) - model(history, observed))[..., 0].abs().max() > 1e-3


def test_constant_channels_and_windows_have_finite_forecasts_and_gradients(model):
    history = walks()
    history[..., 0] = 1234.567
    history[1] = -1e-30
    history[2] = 1e6
    losses = model(history, future=history[:, :HORIZON])
    assert all(loss.isfinite() for loss in losses.values())
    if model.trainable:
        sum(losses.values()).backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    if model.kind == "fem":  # what does not vary is not forecast to
        level = torch.tensor([1234.567, -1e-30, 1e6, 1234.567, 1234.567])
        torch.testing.assert_close(model(history)[..., 0], level[:, None].expand(-1, HORIZON))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("dlinear", "nlinear")])
def test_forecasts_follow_the_scale_and_the_level_of_the_history(kind):
    model, history, observed = make(kind).double(), walks().double(), gaps((5, LOOKBACK, CHANNELS))
    scale, level = torch.tensor([3.0, 0.5, 20.0]).double(), torch.tensor([-5.0, 700.0, 0.1]).double()
    # RevIN adds 1e-5 to the variance, which does not scale.
    tolerance = {"patchtst": 2e-3, "itransformer": 2e-3}.get(kind, 1e-6)
    for seen in (None, observed):
        moved, forecast = model(history * scale + level, seen), model(history, seen)
        some = torch.ones(5, CHANNELS) if seen is None else seen.any(1)
        expected = (forecast * scale + level)[some.bool()[:, None].expand_as(moved)]
        torch.testing.assert_close(
            moved[some.bool()[:, None].expand_as(moved)], expected, rtol=tolerance, atol=tolerance
        )


def test_a_saved_model_forecasts_the_same_bit_for_bit(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert not [*tmp_path.glob("*.bin")]
    for again in (Forecaster.from_pretrained(tmp_path), FORECASTERS[model.kind].from_pretrained(tmp_path)):
        assert type(again) is type(model) and not again.training
        assert torch.equal(again(walks()), model(walks()))
    with pytest.raises(ValueError, match="use_safetensors=False"):
        Forecaster.from_pretrained(tmp_path, use_safetensors=False)
    other = DLinear if model.kind == "fem" else FEMForecaster
    with pytest.raises(ValueError, match=f"kind='{model.kind}'"):
        other.from_pretrained(tmp_path)


@pytest.mark.parametrize("channels", [1, CHANNELS])
@pytest.mark.parametrize("lookback", [LOOKBACK, HORIZON, 1])
def test_forecasts_are_the_same_without_gradients(channels, lookback):
    model, history = make(channels=channels, lookback=lookback), walks(length=lookback, channels=channels)
    with torch.no_grad():
        forecast = model(history)
    torch.testing.assert_close(forecast, model(history), atol=1e-5, rtol=1e-5)


def test_a_window_without_any_value_is_refused_and_masked_values_are_missing():
    model, history = make(), walks().numpy()
    masked = np.ma.masked_array(history, np.random.default_rng(0).random(history.shape) < 0.3)
    np.testing.assert_array_equal(model.predict(masked), model.predict(np.where(masked.mask, np.nan, history)))
    history[3] = np.nan
    with pytest.raises(ValueError, match="in window 3"):
        model.predict(history)
    longer = np.full((LOOKBACK + 2, CHANNELS), np.nan)
    longer[0] = 1.0
    with pytest.raises(ValueError, match=f"at least one of the last {LOOKBACK} that is not missing"):
        model.predict(longer)


def test_working_days_are_followed_by_working_days():
    model = make(channels=1, frequency="B", columns=["a"])
    week = pd.DataFrame({"a": np.arange(5.0)}, index=pd.date_range("2024-01-01", periods=5))  # Monday to Friday
    assert (model.predict(week).index == pd.date_range("2024-01-08", periods=HORIZON, freq="B")).all()
    closing = week.set_axis(week.index + pd.Timedelta("16h"))
    assert (model.predict(closing).index == pd.date_range("2024-01-08 16:00", periods=HORIZON, freq="B")).all()
    days = pd.date_range("2024-01-01", periods=43, freq="B").delete(40)  # with a holiday among the last
    forecast = make(channels=1, columns=["a"]).predict(pd.DataFrame({"a": np.arange(42.0)}, index=days))
    assert (forecast.index.day_of_week < 5).all()


def test_an_empty_batch_has_an_empty_forecast(model):
    assert model(walks()[:0]).shape == (0, HORIZON, CHANNELS)
    assert model(walks()[:0], torch.ones(0, LOOKBACK, CHANNELS, dtype=torch.bool)).shape == (0, HORIZON, CHANNELS)


TRAINED = {**MIXERS, **{kind: {"kind": kind} for kind in ("dlinear", "nlinear", "patchtst", "itransformer")}}


@pytest.mark.parametrize("fields", TRAINED.values(), ids=TRAINED)
def test_gradients_reach_every_parameter(fields):
    model = make(**fields).train()
    torch.manual_seed(0)
    sum(model(walks(), future=walks(length=HORIZON, seed=3)).values()).backward()
    # The mean that follows takes out the biases before a BatchNorm, and softmax those of keys.
    idle = ("out.bias", "down.bias") if model.kind == "patchtst" else ()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and (parameter.grad.abs().max() > 0 or name.endswith(idle)), name


@pytest.mark.parametrize("fields", [*NAMED.values(), *({"prior": name} for name in PRIORS)], ids=[*NAMED, *PRIORS])
def test_every_named_mixer_and_every_prior_makes_a_forecaster(fields):
    model = make(**{**fields, "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2})
    assert model(walks(2)).shape == (2, HORIZON, CHANNELS)
    observed = gaps((5, LOOKBACK, CHANNELS))
    assert torch.equal(model(walks().masked_fill(~observed, math.nan), observed), model(walks(), observed))


def test_gradient_checkpointing_changes_nothing():
    model = make().train()
    gradients = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(0)
        sum(model(walks(), future=walks(length=HORIZON, seed=3)).values()).backward()
        gradients.append(model.head.weight.grad.clone())
        model.gradient_checkpointing_enable()
    torch.testing.assert_close(*gradients)


def test_dropout_drops_its_share_and_keeps_the_mean():
    dropout, x = Dropout(0.3), torch.ones(101, 103, requires_grad=True)
    torch.manual_seed(1)
    y = dropout(x)
    share = (y == 0).double().mean().item()
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / x.numel()) ** 0.5
    torch.testing.assert_close(y[y != 0].unique(), torch.tensor([1 / 0.7]), rtol=1e-4, atol=0)
    y.sum().backward()
    assert torch.equal(x.grad, y)
    assert (
        abs(np.corrcoef((y == 0).detach().double().flatten()[:-1], (y == 0).detach().double().flatten()[1:])[0, 1])
        < 0.05
    )
    torch.manual_seed(1)
    assert torch.equal(dropout(x), y) and not torch.equal(dropout(x), y)
    assert torch.equal(dropout.eval()(x), x) and torch.equal(Dropout(0.0)(x), x)
    assert dropout.train()(x[:0]).shape == (0, 103)


# --- rivals by hand ----------------------------------------------------------------------------------------------


def test_the_last_value_is_the_last_that_was_observed():
    model = make("last-value")
    history = torch.arange(6.0).reshape(1, 2, 3)
    observed = torch.tensor([[[True, True, False], [True, False, False]]])
    assert model(history)[0].tolist() == [[3.0, 4.0, 5.0]] * HORIZON
    assert model(history, observed)[0].tolist() == [[3.0, 1.0, 0.0]] * HORIZON


@pytest.mark.parametrize("season", [2, 5, 8, 13, 2**31 - 1])
def test_seasonal_naive_is_its_definition_for_seasons_longer_than_the_window_too(season):
    """Without memory for a season: the longest here would take terabytes."""
    config = ForecastConfig(kind="seasonal-naive", channels=CHANNELS, lookback=11, horizon=7, season=season)
    window, observed = walks(3)[:, :11], torch.rand(3, 11, CHANNELS, generator=torch.Generator().manual_seed(2)) < 0.6
    for seen in (None, observed):
        found = SeasonalNaive(config)(window, seen)
        known = torch.ones_like(observed) if seen is None else seen
        for b, c in np.ndindex(3, CHANNELS):
            there = [t for t in range(11) if known[b, t, c]]
            for h in range(7):
                same = [t for t in there if (11 + h - t) % season == 0]
                expected = window[b, max(same or there), c] if there else 0.0
                assert found[b, h, c] == expected


def test_dlinear_is_two_linear_maps_of_the_moving_average_and_of_the_rest():
    model, window = make("dlinear").double(), walks(2).double()
    x = window.numpy()
    trend = np.empty_like(x)
    for t in range(LOOKBACK):
        trend[:, t] = np.mean([x[:, min(max(s, 0), LOOKBACK - 1)] for s in range(t - 12, t + 13)], axis=0)
    p = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    expected = np.einsum("hl,blc->bhc", p["trend.weight"], trend) + p["trend.bias"][:, None]
    expected += np.einsum("hl,blc->bhc", p["seasonal.weight"], x - trend) + p["seasonal.bias"][:, None]
    np.testing.assert_allclose(model(window).detach().numpy(), expected, rtol=1e-10)


def test_nlinear_is_a_linear_map_of_what_the_last_value_leaves():
    model, window, observed = make("nlinear").double(), walks().double(), gaps((5, LOOKBACK, CHANNELS))
    weight, bias = (p.detach() for p in model.linear.parameters())
    x, last = window, window[:, -1:]
    expected = torch.einsum("hl,blc->bhc", weight, x - last) + bias[:, None] + last
    torch.testing.assert_close(model(window), expected)
    level = torch.tensor([-5.0, 700.0, 0.1]).double()
    some = observed.any(1)[:, None].expand(-1, HORIZON, -1)
    torch.testing.assert_close(model(window + level, observed)[some], (model(window, observed) + level)[some])


def test_patchtst_is_an_encoder_of_overlapping_patches_with_added_scores():
    model, window = make("patchtst").double(), walks(2).double()
    x = window.mT.flatten(0, 1)
    mean, std = x.mean(1, keepdim=True), (x.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
    z = torch.cat([(x - mean) / std, ((x - mean) / std)[:, -1:].expand(-1, 8)], 1)
    tokens = torch.stack([z[:, start : start + 16] for start in range(0, LOOKBACK - 16 + 8 + 1, 8)], 1)
    x, scores = model.embedding(tokens) + model.positions.weight, 0
    assert x.shape[1] == 5
    for layer in model.layers:
        q, k, v = (part.unflatten(-1, (4, 4)) for part in layer.query_key_value(x).split(16, -1))
        scores = scores + torch.einsum("bthe,bshe->bhts", q, k) / 2
        read = torch.einsum("bhts,bshe->bthe", scores.softmax(-1), v).flatten(2)
        x = layer.attention_norm((x + layer.out(read)).mT).mT
        x = layer.mlp_norm((x + layer.down(nn.functional.gelu(layer.up(x)))).mT).mT
    expected = (model.head(x.flatten(1)) * std + mean).unflatten(0, (2, CHANNELS)).mT
    torch.testing.assert_close(model(window), expected)


def test_itransformer_is_torchs_encoder_with_channels_as_tokens():
    model, window = make("itransformer").double(), walks(2).double()
    mean, std = window.mean(1, keepdim=True), (window.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
    x = model.embedding(((window - mean) / std).mT)
    for ours in model.layers:
        theirs = nn.TransformerEncoderLayer(24, 3, 24, activation="gelu", batch_first=True, dtype=torch.float64).eval()
        both = (ours.attention.query_key_proj, ours.attention.value_proj)
        with torch.no_grad():
            theirs.self_attn.in_proj_weight.copy_(torch.cat([linear.weight for linear in both]))
            theirs.self_attn.in_proj_bias.copy_(torch.cat([linear.bias for linear in both]))
        theirs.self_attn.out_proj, theirs.linear1, theirs.linear2 = ours.attention.out_proj, ours.up, ours.down
        theirs.norm1, theirs.norm2 = ours.attention_norm, ours.mlp_norm
        x = theirs(x)
    torch.testing.assert_close(model(window), model.head(model.norm(x)).mT * std + mean)
