"""Augmentation: each operation by its properties, and the batches that training sees."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from femixer.models.images import middle
from femixer.options import check_options
from femixer.tasks.vision.data import Preparation
from femixer.tasks.vision.data.augmentation import (
    AREAS,
    OPERATIONS,
    Augmentation,
    beta,
    cutmix,
    erase,
    erased_box,
    jitter,
    mix,
    mixup,
    move,
    randaugment,
    random_box,
    random_crop,
    random_flip,
    soft,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def image(width=13, height=11, mode="RGB", seed=0):
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def same(first, second):
    return np.array_equal(np.asarray(first), np.asarray(second))


# Images one by one


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_keeps_size_and_mode_and_repeats_itself(name, mode):
    given = image(mode=mode)
    for strength in (0.0, 0.37, 1.0):
        made = [OPERATIONS[name](given, strength, seeded(3)) for _ in range(2)]
        assert made[0].size == given.size and made[0].mode == mode
        assert same(*made) and np.asarray(made[0]).dtype == np.uint8


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ("AutoContrast", "Equalize", "Invert")])
def test_without_strength_an_operation_changes_nothing(name):
    given = image()
    expected = ImageOps.posterize(given, 4) if name == "Posterize" else given  # published so: 4 bits at most
    assert same(OPERATIONS[name](given, 0.0, seeded()), expected)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "Color"])
def test_with_strength_an_operation_changes_a_grey_image(name):
    given = image(61, 47, "L").point(lambda level: level // 2)
    assert any(not same(OPERATIONS[name](given, 0.9, seeded(seed)), given) for seed in range(3))


def test_the_ranges_are_the_published_ones():
    dot = Image.fromarray(np.zeros((20, 20), np.uint8))
    dot.putpixel((10, 10), 255)
    shifted = np.asarray(OPERATIONS["TranslateX"](dot, 1.0, seeded()))
    assert np.unravel_index(shifted.argmax(), shifted.shape) in [(10, 1), (10, 19)]  # 9 = 0.45 x 20 pixels
    levels = Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    bits = np.asarray(OPERATIONS["Posterize"](levels, 0.9, seeded()))
    assert {*np.unique(bits)} == {0, 128}  # one bit at m = 9
    inverted = np.asarray(OPERATIONS["Solarize"](levels, 0.5, seeded()))[0]
    assert (inverted[:128] == np.arange(128)).all() and (inverted[128:] == 255 - np.arange(128, 256)).all()
    added = np.asarray(OPERATIONS["SolarizeAdd"](levels, 1.0, seeded()))[0]
    assert (added[:128] == np.arange(128) + 110).all() and (added[128:] == np.arange(128, 256)).all()
    brightness = {
        int(np.asarray(OPERATIONS["Brightness"](Image.new("L", (1, 1), 100), 0.5, seeded(s)))[0, 0]) for s in range(9)
    }
    assert brightness == {55, 145}  # 1 +- 0.45


def test_randaugment_is_left_out_a_quarter_of_the_time():
    given = image()
    unchanged = sum(same(randaugment(given, 9, seeded(seed)), given) for seed in range(400))
    assert 0.2 < unchanged / 400 < 0.32  # both operations left out: 1/4, and a few that change nothing


def test_jitter_stays_in_range_and_is_nothing_at_zero():
    given = image()
    assert same(jitter(given, 0.0, seeded()), given)
    grey = Image.new("RGB", (2, 2), (100, 100, 100))
    levels = [np.asarray(jitter(grey, 0.3, seeded(seed)))[0, 0, 0] for seed in range(50)]
    assert min(levels) >= 69 and max(levels) <= 131 and max(levels) - min(levels) > 30


@pytest.mark.parametrize(("width", "height"), [(13, 11), (1, 1), (1, 97), (97, 2)])
def test_a_random_crop_is_inside_and_of_the_asked_area(width, height):
    for seed in range(60):
        left, top, right, bottom = random_box(width, height, 0.08, seeded(seed))
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        assert random_crop(image(width, height), 7, 0.08, seeded(seed)).size == (7, 7)
    areas = [
        (b[2] - b[0]) * (b[3] - b[1]) / 10**6 for b in (random_box(1000, 1000, 0.25, seeded(s)) for s in range(200))
    ]
    assert 0.24 < min(areas) < 0.3 and 0.85 < max(areas) <= 1


def test_evaluation_sees_the_middle():
    given = image(16, 8)
    assert same(middle(given, 8, 1.0), given.crop((4, 0, 12, 8)))
    assert same(middle(image(8, 8), 8, 1.0), image(8, 8))
    assert middle(image(1, 97), 7, 0.875).size == (7, 7)
    assert middle(image(30_000, 1), 64, 0.875).size == (64, 64)  # 2 million pixels wide, if all of it were enlarged


@pytest.mark.parametrize("sides", [(53, 31), (31, 53), (11, 97), (7, 5)])
def test_the_middle_is_that_of_the_whole_resized_image(sides):
    # Of little contrast: Pillow rounds and clips between its two passes, in whichever order it takes them.
    given, shorter = image(*sides).point(lambda value: 80 + value // 4), 16
    width, height = (max(shorter, round(side * shorter / min(sides))) for side in sides)
    left, top = (width - 13) // 2, (height - 13) // 2
    whole = given.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + 13, top + 13))
    seen = middle(given, 13, 13 / shorter)
    assert np.abs(np.asarray(seen).astype(int) - np.asarray(whole).astype(int)).max() <= 2


def test_a_flip_happens_as_often_as_asked():
    given = image()
    flipped = sum(same(random_flip(given, 0.25, seeded(seed)), ImageOps.mirror(given)) for seed in range(300))
    assert 50 < flipped < 100
    assert same(random_flip(given, 0.0, seeded()), given) and not same(random_flip(given, 1.0, seeded()), given)


# Batches


def test_soft_labels_sum_to_one_and_spread_the_smoothing():
    targets = soft(torch.tensor([2, 0]), 5, 0.1)
    assert torch.allclose(targets.sum(1), torch.ones(2)) and targets.argmax(1).tolist() == [2, 0]
    assert torch.allclose(targets[0], torch.tensor([0.02, 0.02, 0.92, 0.02, 0.02]))
    assert torch.equal(soft(torch.tensor([1]), 3, 0.0), torch.tensor([[0.0, 1.0, 0.0]]))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.77, 1.0])
def test_cutmix_labels_are_the_share_of_the_area(share):
    count, classes = 7, 7
    pixels = torch.arange(count).float()[:, None, None, None].expand(count, 3, 11, 13)
    targets = soft(torch.arange(count), classes, 0.0)
    for seed in range(20):
        mixed, labels = cutmix(pixels, targets, share, seeded(seed))
        assert torch.allclose(labels.sum(1), torch.ones(count))
        for number in range(count):  # images are constant, so what is another value comes from the other
            own = (mixed[number] == number).float().mean()
            assert math.isclose(labels[number, number].item(), own.item(), abs_tol=1e-6)
    if share == 1.0:
        assert torch.equal(mixed, pixels)


def test_mixup_mixes_images_and_labels_alike():
    pixels, targets = torch.rand(5, 3, 2, 2), soft(torch.arange(5), 5, 0.1)
    mixed, labels = mixup(pixels, targets, 0.7)
    assert torch.allclose(mixed[0], 0.7 * pixels[0] + 0.3 * pixels[4])
    assert torch.allclose(labels[0], 0.7 * targets[0] + 0.3 * targets[4]) and torch.allclose(
        labels.sum(1), torch.ones(5)
    )
    assert torch.equal(mixup(pixels, targets, 1.0)[0], pixels)


def test_half_of_the_batches_are_cut_where_both_are_asked_for():
    pixels, targets = torch.arange(2.0)[:, None, None, None].expand(2, 1, 8, 8), soft(torch.arange(2), 2, 0.0)
    whole = [mix(pixels, targets, 0.8, 1.0, seeded(seed))[0] for seed in range(200)]
    cut = sum(bool(((mixed == 0) | (mixed == 1)).all()) for mixed in whole)
    assert 75 < cut < 125
    assert mix(pixels, targets, 0.0, 0.0, seeded()) == (pixels, targets)
    shares = [beta(seeded(seed), 0.8) for seed in range(400)]
    assert 0.44 < sum(shares) / 400 < 0.56 and min(shares) < 0.05 and max(shares) > 0.95


def test_erasing_covers_the_asked_area_in_the_asked_share_of_images():
    pixels = torch.full((400, 2, 31, 37), 9.0)
    erased = erase(pixels, 0.25, seeded(1))
    changed = erased != pixels
    touched = changed.flatten(1).any(1)
    assert 70 < touched.sum() < 130
    areas = changed[touched].float().flatten(1).mean(1)
    assert AREAS[0] * 0.7 < areas.min() < 0.06 and 0.25 < areas.max() < AREAS[1] * 1.1
    noise = erased[changed]
    assert abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.05
    assert (pixels == 9).all() and erase(pixels, 0.0, seeded()) is pixels
    assert erased_box(1, 1, seeded()) == (0, 0, 0, 0)  # nothing fits


def test_a_move_stays_in_range_and_repeats_itself():
    pixels = torch.rand(3, 1, 5, 7)
    assert move(pixels, 0, 0, seeded()) is pixels
    moved = move(pixels, 2.0, 10.0, seeded(4))
    assert moved.shape == pixels.shape and moved.min() >= 0 and moved.max() <= 1
    assert torch.equal(moved, move(pixels, 2.0, 10.0, seeded(4))) and not torch.equal(
        moved, move(pixels, 2.0, 10.0, seeded(5))
    )


@pytest.mark.parametrize(
    ("drawn", "shift", "turn", "expected"),
    [
        ([0.5, 1.0, 0.5], 1.0, 0.0, lambda x: torch.nn.functional.pad(x, (0, 1))[..., 1:]),
        ([1.0, 0.5, 0.5], 0.0, 90.0, lambda x: x.rot90(1, (-2, -1))),
    ],
)
def test_moves_are_in_pixels_and_degrees(monkeypatch, drawn, shift, turn, expected):
    pixels = torch.rand(2, 3, 7, 7)
    monkeypatch.setattr(torch, "rand", lambda count, *_, **__: torch.tensor([drawn]).expand(count, 3))
    assert torch.allclose(move(pixels, shift, turn, seeded()), expected(pixels), atol=1e-5)


def test_without_options_a_batch_is_what_evaluation_sees():
    preparation, pixels = Preparation(7, 3), torch.randint(256, (4, 3, 7, 7), dtype=torch.uint8)
    made, targets = Augmentation().batch(pixels, torch.arange(4), 4, preparation, seeded())
    assert torch.equal(made, preparation.normalized(pixels / 255)) and torch.equal(targets, torch.eye(4))
    given = image(9, 9)
    assert not Augmentation().of_images and same(Augmentation().view(given, 9, 1.0, seeded()), given)


@pytest.mark.parametrize(
    ("option", "value"),
    [("smallest_crop", 0.0), ("flip", 1.1), ("randaugment", 11), ("smoothing", 1.0), ("repeats", 0), ("mixup", -0.1)],
)
def test_options_out_of_range_are_named(option, value):
    with pytest.raises(ValueError, match=f"{option}={value}"):
        check_options(Augmentation(**{option: value}))
