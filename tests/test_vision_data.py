"""Images: decoding, folders, data sets, their parts, and the batches that are made of them."""

import io
from collections import Counter
from itertools import chain

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset

from femixer.models.images import Unreadable
from femixer.tasks.vision.data import (
    SPLITS,
    Arrays,
    Preparation,
    Reading,
    blocks_of,
    decoded,
    found,
    read,
    some,
    stratified,
)
from femixer.tasks.vision.data import sources as hub
from femixer.tasks.vision.data.augmentation import Augmentation
from femixer.tasks.vision.data.sources import Stream
from femixer.tasks.vision.data.views import Ahead, Batches, Views, shuffled
from femixer.training import Part

RED, GREEN = (250, 10, 20), (10, 250, 20)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(seed, width=9, height=7):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def folder(root, layout, per_class=5):
    """Images in root/PART/CLASS/0.png ..., for each PART -> classes of the layout."""
    for number, (part, classes) in enumerate(layout.items()):
        for label, name in enumerate(classes):
            place = root / part / name
            place.mkdir(parents=True)
            for index in range(per_class):
                noise(100 * number + 10 * label + index).save(place / f"{index}.png")
    return root


def content(images):
    """Name -> label of all images."""
    return {item.name: item.read(3)[1] for item in map(images.__getitem__, range(len(images)))}


# One image


def test_every_kind_of_file_becomes_eight_bits_of_one_or_three_channels():
    ramp = Image.fromarray(np.array([[0, 1 << 8, 200 << 8, 65535]], dtype=np.uint16))
    assert np.asarray(decoded(encoded(ramp), 1)).tolist() == [[0, 1, 200, 255]]
    red = Image.new("RGB", (5, 3), RED)
    for given in (red, red.convert("RGBA"), red.quantize(), red.convert("CMYK")):
        kind = "JPEG" if given.mode == "CMYK" else "PNG"
        made = decoded(encoded(given, kind), 3)
        assert (made.mode, made.size) == ("RGB", (5, 3))
        assert np.abs(np.asarray(made).astype(int) - RED).max() < 12
    assert decoded(encoded(red), 1).mode == "L" and decoded(encoded(red.convert("1")), 3).mode == "RGB"
    assert decoded(encoded(red.convert("LA")), 3).mode == "RGB"
    clear = Image.new("RGBA", (2, 2), (*RED, 0))
    assert np.asarray(decoded(encoded(clear), 3)).min() == 255  # white, whatever colour hides below


def test_an_image_is_turned_upright():
    image = Image.new("RGB", (5, 3), RED)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert decoded(encoded(image, "JPEG", exif=exif), 3).size == (3, 5)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (b"", "empty"),
        (b"no image", "not a format"),
        (encoded(noise(0), "JPEG")[:200], "."),
        (encoded(noise(0))[:60], "."),
    ],
)
def test_what_is_no_image_says_why(tmp_path, given, told):
    path = tmp_path / "broken.jpg"
    path.write_bytes(given)
    for each in (given, path):
        with pytest.raises(Unreadable, match=told):
            decoded(each, 3)


# Parts


def test_the_digits_are_meant_also_where_a_folder_has_their_name(tmp_path, monkeypatch):
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    assert read("digits").counts == {"train": 1294, "validation": 144, "test": 359}
    with pytest.raises(ValueError, match="digits has no folders"):
        read("./digits")


def test_the_digits_have_fixed_parts_with_a_share_of_each_class():
    images = read("digits")
    assert images.counts == {"train": 1294, "validation": 144, "test": 359} and sum(images.counts.values()) == 1797
    assert len(images.classes) == 10 and images.channels == 1
    numbers = [images.splits["test"].indices]
    train = {split: images.splits[split] for split in ("train", "validation")}
    numbers += [[part.dataset.indices[n] for n in part.indices] for part in train.values()]
    assert sorted(chain(*numbers)) == [*range(1797)]
    labels = Counter(content(images.splits["test"]).values())
    assert {*labels.values()} <= {34, 35, 36, 37}  # a fifth of 174 to 183
    assert images.fingerprint == read("digits").fingerprint != read("digits", Reading(validation=0.2)).fingerprint
    pixels = np.asarray(images.splits["test"][0].read(1)[0])
    assert pixels.shape == (8, 8) and pixels.max() == 255


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_a_part_has_its_share_of_all_and_of_each_class(share):
    labels = torch.tensor([0] * 53 + [1] * 101 + [2] * 7 + [3])
    rest, held = stratified(labels, share, "test")
    assert torch.equal(torch.cat([rest, held]).sort().values, torch.arange(162)) and len(held) == round(share * 162)
    for label in range(3):
        assert abs((labels[held] == label).sum() - share * (labels == label).sum()) <= 1
    assert (labels[held] != 3).all()  # a class's only image is for training
    assert len(stratified(torch.arange(5), share, "test")[1]) == 0


@pytest.mark.parametrize(
    ("parts", "counts"),
    [
        ({"train": "ab", "val": "ab"}, (8, 2, 10)),  # the other part is the test, validation is cut off
        ({"train": "ab", "test": "ab"}, (8, 2, 10)),
        ({"train": "ab", "validation": "ab", "test": "ba"}, (10, 10, 10)),
        ({"": "abc"}, (10, 2, 3)),
    ],
)
def test_folders_are_read_as_imagenet_is_laid_out(tmp_path, parts, counts):
    images = read(str(folder(tmp_path, parts)), Reading(validation=0.2))
    assert (
        images.counts == dict(zip(SPLITS, counts, strict=True))
        and images.classes == tuple("abc")[: len(images.classes)]
    )
    names = [content(images.splits[split]) for split in SPLITS]
    for part in names:
        assert all(f"/{images.classes[label]}/" in name for name, label in part.items())
    assert len({name for part in names for name in part}) == sum(counts)  # no image is in two parts


def test_a_folder_to_be_evaluated_on_may_have_one_part_and_one_class(tmp_path):
    for name in ("val", "test"):
        images = found(str(folder(tmp_path / name, {name: "b"})))
        assert images.counts == {"test": 5} and images.classes == ("b",) and not images.one_part
        with pytest.raises(ValueError, match="one class only, b"):
            read(str(tmp_path / name))
    both = found(str(folder(tmp_path / "both", {"val": "ab", "test": "ac"})))
    assert both.counts == {"validation": 10, "test": 10} and both.classes == ("a", "b", "c")
    classes = read(str(folder(tmp_path / "classes", {"": ("real", "test")})))
    assert classes.classes == ("real", "test") and classes.one_part
    assert found(str(folder(tmp_path / "train", {"train": "ab"}))).one_part


def test_images_are_the_same_however_they_are_divided(tmp_path):
    data = str(folder(tmp_path, {"": "ab"}))
    first, second = (read(data, Reading(validation=share)) for share in (0.2, 0.4))
    assert first.whole == second.whole and first.fingerprint != second.fingerprint
    assert (first.validation, second.validation) == (0.2, 0.4)
    joined = ConcatDataset([first.splits[split] for split in SPLITS])
    assert content(joined) == {name: label for split in SPLITS for name, label in content(first.splits[split]).items()}


def test_a_folder_that_was_moved_is_the_same_data(tmp_path):
    first = read(str(folder(tmp_path / "a", {"": "xy"})))
    (tmp_path / "a").rename(tmp_path / "b")
    assert read(str(tmp_path / "b")).fingerprint == first.fingerprint
    (tmp_path / "b/x/0.png").rename(tmp_path / "b/x/9.png")
    assert read(str(tmp_path / "b")).fingerprint != first.fingerprint


def test_what_is_wrong_with_a_folder_is_said_with_its_path(tmp_path):
    def refused(place, told):
        with pytest.raises(ValueError, match=told):
            read(str(place))

    refused(tmp_path / "nowhere", "nowhere.*is no folder; choose digits")
    refused(tmp_path, "has no folders, one per class")
    folder(tmp_path / "one", {"train": "a", "val": "a"})
    refused(tmp_path / "one", "one class only, a")
    folder(tmp_path / "alone", {"train": "ab"})
    refused(tmp_path / "alone", "has only a part for train; training needs a training and another part")
    folder(tmp_path / "empty", {"": "ab"})
    (tmp_path / "empty/c").mkdir()
    refused(tmp_path / "empty", "empty/c has no images")
    folder(tmp_path / "strange", {"train": "ab", "val": "ac"})
    refused(tmp_path / "strange", "val/c is a class that the training images do not have; they have a, b")
    (tmp_path / "void/a").mkdir(parents=True)
    (tmp_path / "void/b").mkdir()
    (tmp_path / "void/a/notes.txt").write_text("no image")
    refused(tmp_path / "void", "void has no images in its folders a, b")
    folder(tmp_path / "few", {"": "ab"}, per_class=1)
    refused(tmp_path / "few", "none are left for")
    with pytest.raises(ValueError, match="streaming=True is not allowed"):
        read(str(tmp_path / "one"), Reading(streaming=True))
    with pytest.raises(ValueError, match="channels=2"):
        read("digits", channels=2)


# Data sets


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A folder of parquet files that `datasets` loads, with a broken image and CIFAR's names of columns."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    kinds = datasets.Features(
        {
            "img": datasets.Image(),
            "fine_label": datasets.ClassLabel(names=["a", "b", "c"]),
            "coarse_label": datasets.ClassLabel(names=["x", "y"]),
        }
    )

    def made(hidden=False, label=None):
        place = tmp_path / "data"
        place.mkdir()
        for number, (part, count) in enumerate({"train": 31, "test": 11}.items()):
            labels = [-1 if hidden and part == "test" else index % 3 for index in range(count)]
            labels[3] = labels[3] if label is None else label
            rows = {
                "img": [{"bytes": encoded(noise(50 * number + index)), "path": None} for index in range(count)],
                "fine_label": labels,
                "coarse_label": [0] * count,
            }
            rows["img"][5]["bytes"] = b"broken"
            datasets.Dataset.from_dict(rows, features=kinds).to_parquet(place / f"{part}-00000.parquet")
        return f"datasets:{place}"

    return made


def test_a_data_set_is_read_by_the_types_of_its_columns(table):
    images = read(table(), Reading(validation=0.2))
    assert images.classes == ("a", "b", "c") and images.counts == {"train": 25, "validation": 6, "test": 11}
    test = images.splits["test"]
    image, label = test[4].read(3)
    assert label == 1 and np.array_equal(np.asarray(image), np.asarray(noise(54))) and "row 4" in test[4].name
    with pytest.raises(Unreadable, match="not a format"):
        test[5].read(3)


def test_a_stream_gives_the_same_images_block_by_block(table):
    data = table()
    reading = Reading(validation=0.2, streaming=True, buffer=7)
    whole, stream = read(data, Reading(validation=0.2)), read(data, reading)
    assert stream.counts == {"train": 25, "validation": 6, "test": 11} and blocks_of(stream.splits["train"]) == [
        6,
        6,
        5,
        6,
        2,
    ]
    assert blocks_of(stream.splits["test"]) == [7, 4]
    order = [0, 3, 1, 10, 8, 9, 2, 0]  # forth, and back to the beginning
    for index in order:
        first, second = (images.splits["test"][index].read(3) for images in (whole, stream))
        assert np.array_equal(np.asarray(first[0]), np.asarray(second[0])) and first[1] == second[1]
    held = {item.name for split in ("train", "validation") for item in stream.splits[split]}
    assert len(held) == 31
    with pytest.raises(ValueError, match="workers=2 is not allowed"):
        Ahead(Batches(Views(stream.splits["train"], Preparation(7, 3)), Augmentation(), 3, 5, 0), 2, [Part()], 3)


@pytest.mark.parametrize("repeats", [1, 3])
def test_an_epoch_reads_a_stream_once_and_shows_some_of_every_block(table, monkeypatch, repeats):
    train = read(table(), Reading(validation=0.2, streaming=True, buffer=7)).splits["train"]
    held = []
    hold = Stream._hold
    monkeypatch.setattr(Stream, "_hold", lambda self, number: (held.append(number), hold(self, number)))
    made = Batches(Views(train, Preparation(7, 3), Augmentation(flip=0.5)), Augmentation(repeats=repeats), 3, 4, 0)
    for step in range(1, made.per_epoch + 1):
        made(step, Part())
    assert held == [0, 1, 2, 3, 4]


def test_a_label_out_of_range_is_named_with_its_row(table):
    with pytest.raises(ValueError, match=r"row 3: fine_label=-1 is not allowed; choose one of 0 to 2"):
        read(table(label=-1))


def test_a_test_part_without_labels_is_left_out(table):
    assert read(table(hidden=True), Reading(validation=0.2)).counts == {"train": 20, "validation": 5, "test": 6}


def test_columns_and_names_that_there_are_not_are_refused(table):
    data = table()
    with pytest.raises(
        ValueError, match="label_column='lable' is not allowed; choose a column of labels, out of img, fine"
    ):
        read(data, Reading(label_column="lable"))
    assert read(data, Reading(label_column="coarse_label")).classes == ("x", "y")
    with pytest.raises(ValueError, match="cannot be opened"):
        read("datasets:./nowhere/at-all")


# Batches


def grey(count=23, size=5):
    pixels = np.arange(count, dtype=np.uint8)[:, None, None].repeat(size, 1).repeat(size, 2)
    return Arrays(pixels, torch.arange(count) % 3, "image")


def numbers(batch):
    """Which images of `grey` a batch has."""
    return ((batch.pixels[:, 0, 0, 0] * 0.5 + 0.5) * 255).round().long().tolist()


def batches(images=None, batch=7, seed=3, **options):
    augmentation = Augmentation(**options)
    return Batches(Views(images or grey(), Preparation(5, 1), augmentation), augmentation, 3, batch, seed)


def test_an_epoch_has_every_image_once_and_a_step_is_the_same_whenever_it_is_asked_for():
    made = batches()
    epochs = [[made(4 * epoch + step, Part())[0] for step in range(1, 5)] for epoch in range(2)]
    orders = [[number for batch in epoch for number in numbers(batch)] for epoch in epochs]
    assert all(sorted(order) == [*range(23)] for order in orders) and orders[0] != orders[1]
    halves = [batches()(6, Part(index, 2))[0] for index in range(2)]
    assert numbers(halves[0]) + numbers(halves[1]) == numbers(epochs[1][1])
    assert orders[0] != [n for step in range(1, 5) for n in numbers(batches(seed=4)(step, Part())[0])]


def test_repeats_are_other_views_of_the_same_image():
    ramp = Arrays(np.random.default_rng(0).integers(0, 256, (12, 9, 9), dtype=np.uint8), torch.arange(12) % 3, "noise")
    batch, _ = batches(ramp, batch=12, repeats=3, smallest_crop=0.2)(1, Part())
    labels = batch.targets.argmax(1).view(4, 3)
    assert (labels == labels[:, :1]).all() and len(batch.pixels) == 12
    views = batch.pixels.view(4, 3, 1, 5, 5)
    assert not torch.equal(views[:, 0], views[:, 1])


def test_blocks_are_shuffled_within_themselves():
    sizes = [5, 7, 0, 11]
    order = shuffled(sizes, 1, torch.Generator().manual_seed(0))
    assert [sorted(block.tolist()) for block in order.split(sizes)] == [
        block.tolist() for block in torch.arange(23).split(sizes)
    ]
    assert not torch.equal(order, torch.arange(23))
    three = some(some(grey(), torch.arange(0, 23, 2)), torch.tensor([1, 5, 11]))
    assert blocks_of(three) is None and three[1].name == "image 10"


def test_a_broken_image_is_named_once_and_the_next_takes_its_place(tmp_path):
    folder(tmp_path, {"": "ab"}, per_class=6)
    (tmp_path / "a/1.png").write_bytes(b"")
    (tmp_path / "a/2.png").write_bytes(b"broken")
    (tmp_path / "b/5.png").write_bytes((tmp_path / "b/5.png").read_bytes()[:40])
    images = read(str(tmp_path), Reading(validation=0.2))
    assert [broken.name for broken in images.broken] == [str(tmp_path / "a/1.png")]  # seen without reading it
    for views in (Views(images.splits[split], Preparation(5, 3)) for split in SPLITS):
        assert sum(len(numbers) for numbers, _, _ in views.batches(torch.arange(len(views)), 2)) == len(views) - len(
            views.broken
        )
    everything = some(images.splits["train"].dataset.dataset, torch.arange(11))
    made = Batches(Views(everything, Preparation(5, 3)), Augmentation(), 2, 4, 0)
    steps = [made(step, Part()) for step in range(1, 7)]
    assert [len(batch.pixels) for batch, _ in steps] == [3, 4, 4] * 2  # whatever is broken
    names = [broken.name for _, told in steps for broken in told]
    assert sorted(names) == [str(tmp_path / "a/2.png"), str(tmp_path / "b/5.png")]
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"broken")
    with pytest.raises(ValueError, match="none of the 11 training images can be read"):
        Batches(Views(everything, Preparation(5, 3)), Augmentation(), 2, 4, 0)(1, Part())


def test_workers_make_the_same_batches(recwarn):
    made = batches(smallest_crop=0.5, flip=0.5, randaugment=9, mixup=0.8, erasing=0.5)
    parts = [Part(0, 2), Part(1, 2)]
    ahead = Ahead(made, 1, parts, 5)
    for step in (1, 2, 4):  # and a jump, as after a resumption
        for part in parts:
            (one, _), (other, _) = ahead(step, part), made(step, part)
            assert torch.equal(one.pixels, other.pixels) and torch.equal(one.targets, other.targets)


@pytest.mark.parametrize(
    ("pixels", "mode", "expected"),
    [
        (np.array([[0, 100], [200, 255]], dtype=np.int32), "I", [[0, 100], [200, 255]]),
        (np.array([[0, 256], [512, 65535]], dtype=np.int32), "I", [[0, 1], [2, 255]]),
        (np.array([[0, 0.2], [0.6, 1.0]], dtype=np.float32), "F", [[0, 51], [153, 255]]),
        (np.array([[0, 100], [200, 255]], dtype=np.float32), "F", [[0, 100], [200, 255]]),
        (np.array([[0, 256], [512, 65535]], dtype=np.uint16), "I;16", [[0, 1], [2, 255]]),
    ],
)
def test_deep_images_keep_their_range(tmp_path, pixels, mode, expected):
    Image.fromarray(pixels).save(tmp_path / "deep.tiff")
    with Image.open(tmp_path / "deep.tiff") as written:
        assert written.mode == mode
    assert np.asarray(decoded(tmp_path / "deep.tiff", 1)).tolist() == expected
    Image.fromarray(np.array([[-1.0, 1e9]], dtype=np.float32)).save(tmp_path / "odd.tiff")
    with pytest.raises(Unreadable, match="a range that is not known"):
        decoded(tmp_path / "odd.tiff", 1)


@pytest.fixture
def named(tmp_path, monkeypatch):
    """The same with names as labels: of each part those that are given."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})

    def made(**parts):
        (tmp_path / "data").mkdir()
        for part, labels in parts.items():
            rows = {"image": [{"bytes": encoded(noise(3)), "path": None}] * len(labels), "label": labels}
            datasets.Dataset.from_dict(rows, features=kinds).to_parquet(tmp_path / f"data/{part}-00000.parquet")
        return f"datasets:{tmp_path / 'data'}"

    return made


def test_names_as_labels_and_a_test_part_alone(named):
    data = named(test=["b", "a", "c"] * 3)
    images = found(data)
    assert images.classes == ("a", "b", "c") and images.counts == {"test": 9}
    assert [images.splits["test"][n].read(3)[1] for n in range(3)] == [1, 0, 2]
    with pytest.raises(ValueError, match="has only a part for test; training needs"):
        read(data)


@pytest.mark.parametrize("wrong", ["zebra", None])
def test_names_that_training_does_not_know_are_refused_at_once(named, wrong):
    with pytest.raises(ValueError, match=f"test row 2: label={wrong!r} is not allowed; choose one of a, b"):
        read(named(train=["b", "a"] * 11, test=["a", "b", wrong]))


def test_a_stream_holds_out_what_stays_in_memory(table, monkeypatch):
    monkeypatch.setattr(hub, "OF_A_STREAM", 2)
    images = read(table(), Reading(validation=0.2, streaming=True, buffer=7))
    assert images.counts["validation"] <= 2 and images.counts["train"] + images.counts["validation"] == 31
