"""Image classification: training, resuming, evaluating, maps and tables."""

import json
import os
import shlex
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from started import Started
from torch import nn
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

from femixer.cli import main
from femixer.models import FEMImageProcessor
from femixer.models.named import parameter_count
from femixer.options import check_options, parse
from femixer.reporting.figures import save
from femixer.tasks.vision import TASK
from femixer.tasks.vision.data import Arrays, DataSet, Files, Preparation, read
from femixer.tasks.vision.data import views as views_module
from femixer.tasks.vision.data.views import Batches, Views, spread, stacked
from femixer.tasks.vision.evaluate import confusion, map_figure, samples
from femixer.tasks.vision.fit import Fitting, Predictions, averaged, averages, averaging, error, predicted
from femixer.tasks.vision.model import ENCODERS, Classifier, Sizes, config_of, specified
from femixer.tasks.vision.task import Train, VisionRun, with_recipe_of_data, within_epochs
from femixer.training import adamw

COLOURS = {"blue": (30, 40, 200), "green": (40, 200, 30), "red": (200, 30, 40)}
SIZES = "--image-size 8 --patch-size 4 --width 8 --layers 1 --heads 2 --batch 8 --lr 0.005 --warmup-epochs 0 --epochs 4"
TRAIN = shlex.split(
    f"vision train {SIZES} --validation 0.3 --threads 1 --repeats 2 --ema 0.5 --initializer-range 0.1"
    " --save-every 2 --epochs 8 --data"
)
RUN = shlex.split(f"vision run {SIZES} --models FEM-SM SMAttn --seeds 2 --parameters 3000 --data")


def paint(root, per_class=11, size=(11, 9)):
    """A folder per colour with images that are easily told apart, two of them broken."""
    draw = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (root / name).mkdir(parents=True)
        for number in range(per_class):
            pixels = np.clip(np.array(colour) + draw.integers(-30, 30, (size[1], size[0], 3)), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{number:02d}.png")
    (root / "red/00.png").write_bytes(b"")
    (root / "red/01.png").write_bytes(b"no image at all")
    return root


def test_channels_are_one_or_three():
    assert [parse(Sizes, ["--channels", each], "vision train").channels for each in ("1", "3")] == [1, 3]
    with pytest.raises(ValueError, match="channels=2 is not allowed; choose 1 or 3"):
        check_options(Sizes(channels=2))


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    return paint(tmp_path_factory.mktemp("data") / "colours")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, colours):
    """The results folder of a training that was not disturbed."""
    out = tmp_path_factory.mktemp("results") / "whole"
    assert main([*TRAIN, str(colours), "--out", str(out)]) == 0
    return out


def lines(path):
    return path.read_text().splitlines()


def records(folder):
    found = map(json.loads, lines(folder / "metrics.jsonl"))
    return [{name: value for name, value in record.items() if name != "seconds"} for record in found]


# Training


def test_a_training_leaves_everything_about_it_and_a_table_shows_it(trained, colours, tmp_path, capsys):
    files = {path.name for path in trained.iterdir()}
    assert {"config.json", "metrics.jsonl", "table.md", "model", "broken.jsonl"} <= files
    card = (trained / "model" / "README.md").read_text(encoding="utf-8")
    assert all(f"## {part}" in card for part in ("Sizes", "Data", "Metrics", "Citation")) and "test accuracy" in card
    for name in ("figure.png", "confusion.png", "predictions.png", "maps.png"):
        assert (trained / name).read_bytes().startswith(b"\x89PNG")
    found = records(trained)
    assert [r["split"] for r in found].count("test") == 1 and found[-1]["split"] == "test"
    assert len([r for r in found if r["split"] == "validation"]) == 9 and "average_top1" in found[0]
    broken = {line["name"]: line["reason"] for line in map(json.loads, lines(trained / "broken.jsonl"))}
    assert broken == {
        str(colours / "red/00.png"): "the file is empty",
        str(colours / "red/01.png"): "not a format that Pillow knows",
    }
    assert found[-1]["broken"] == 2 and "2 images could not be read" in (trained / "table.md").read_text()
    assert main([*TRAIN, str(colours), "--out", str(trained), "--resume"]) == 0  # only shows it
    assert f"| {found[-1]['top1']:.2%} |" in capsys.readouterr().out
    assert main(["vision", "table", "--results", str(trained), "--out", str(tmp_path)]) == 0
    assert f"{100 * found[-1]['top1']:.2f}" in capsys.readouterr().out


def test_the_saved_model_is_the_best_one_and_has_the_reported_scores(trained, colours):
    classifier = Classifier.load(trained)
    assert classifier.classes == ("blue", "green", "red")
    images = read(str(colours))
    scores = predicted(classifier.model, Views(images.splits["test"], classifier.preparation), 5, "test").scores()
    assert {name: records(trained)[-1][name] for name in scores} == pytest.approx(scores)
    assert scores["top1"] > 0.6 and scores["top5"] == 1.0
    model = AutoModelForImageClassification.from_pretrained(trained / "model")
    assert model.config.id2label == {0: "blue", 1: "green", 2: "red"} and model.config.drop_path == 0.1


def killed_at_11(command):
    """`femixer COMMAND` in this process, which does not survive it."""
    make = Batches.__call__

    def batch(self, step, part):
        if step == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return make(self, step, part)

    Batches.__call__ = batch
    main(command)


def test_a_killed_run_resumes_to_the_same_digits(tmp_path, trained, colours):
    out = tmp_path / "killed"
    command = [*TRAIN, str(colours), "--out", str(out)]
    assert Started(killed_at_11, command).end().code == -signal.SIGKILL
    assert [path.name for path in sorted(out.glob("checkpoints/step-*"))][-1] == "step-00000010"
    assert main([*command, "--resume"]) == 0
    assert records(out) == records(trained)
    first, second = (load_file(folder / "model/model.safetensors") for folder in (out, trained))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (out / "broken.jsonl").read_text() == (trained / "broken.jsonl").read_text()


def test_the_average_follows_the_weights_and_is_put_back():
    model = nn.Linear(3, 2)
    optimizer = averaging(adamw(model, 0.1), 0.75)
    expected = None
    for _ in range(4):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        weight = model.weight.detach().clone()
        expected = weight if expected is None else 0.75 * expected + 0.25 * weight
    with averaged(model, optimizer):
        assert torch.allclose(model.weight, expected) and not torch.equal(model.weight, weight)
    assert torch.equal(model.weight, weight)


def test_the_better_of_weights_and_average_counts():
    worse = {"top1": 0.8, "loss": 0.5, "average_top1": 0.7, "average_loss": 0.1}
    better = {**worse, "average_top1": 0.8}
    assert not averages(worse) and error(worse) == pytest.approx((0.2, 0.5))
    assert averages(better) and error(better) == pytest.approx((0.2, 0.1))
    assert not averages({"top1": 0.8, "loss": 0.5})


def test_scores_are_shares_of_the_images_and_their_mean_loss():
    logits = torch.tensor(
        [[5.0, 0, 0, 0, 0, 0, 0], [3, 4, 0, 0, 0, 0, 0], [7, 6, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6, 7]]
    )
    made = Predictions(torch.arange(4), torch.tensor([0, 0, 6, 2]), logits)
    scores = made.scores()
    assert (scores["top1"], scores["top5"]) == (0.25, 0.75)
    assert scores["loss"] == pytest.approx(-logits.log_softmax(-1)[range(4), [0, 0, 6, 2]].mean().item())
    expected = torch.zeros(7, 7, dtype=torch.long)
    expected[0, 0] = expected[0, 1] = expected[6, 0] = expected[2, 6] = 1
    assert torch.equal(made.confusion(), expected)


def test_images_of_which_none_can_be_read_are_named(trained):
    classifier = Classifier.load(trained)
    empty = Files(Path("nowhere"), ["a.png", "b.png"], torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"none of the 2 validation images can be read; of nowhere/a.png: No such"):
        predicted(classifier.model, Views(empty, classifier.preparation), 5, "validation")


def test_names_are_drawn_as_they_are_and_nothing_is_cut_off(tmp_path, trained):
    classes = ("$x_$", "a_$^", "a class of so many letters")
    made = Predictions(torch.arange(3), torch.tensor([0, 1, 2]), torch.eye(3)[[0, 2, 1]])
    views = Views(Arrays(np.zeros((3, 8, 8), np.uint8), torch.arange(3), "black"), Preparation(8, 1))
    title = "a long title of $x_$ that is wider than the matrix of three classes"
    drawing = confusion(made, classes, title)
    save(drawing, tmp_path / "confusion.png")
    with Image.open(tmp_path / "confusion.png") as file:
        assert file.width > 120 * drawing.get_axes()[0].title.get_fontsize() / 72 * 0.5 * len(title)
    save(samples(made, views, classes, title), tmp_path / "predictions.png")
    classifier = Classifier.load(trained)
    classifier.model.config.id2label = dict(enumerate(classes))
    pixels = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    save(map_figure(classifier, pixels, [0], title), tmp_path / "maps.png")


# Other commands


def test_a_model_is_evaluated_on_other_folders(tmp_path, trained, colours, capsys):
    command = ["vision", "eval", "--model", str(trained), "--out", str(tmp_path / "eval")]
    assert main([*command, "--data", str(colours)]) == 0
    scores = json.loads((tmp_path / "eval/scores.json").read_text())
    assert scores["loss"] == pytest.approx(records(trained)[-1]["loss"], rel=1e-5) and scores["pictures"] == 6
    assert main([*command, "--data", str(colours), "--split", "validation"]) == 0  # the part that training held out
    best = max((r for r in records(trained) if r["split"] == "validation"), key=lambda r: -error(r)[0])
    scores = json.loads((tmp_path / "eval/scores.json").read_text())
    assert scores["top1"] == pytest.approx(1 - error(best)[0]) and scores["pictures"] + scores["broken"] == 8
    shown = capsys.readouterr()
    assert f"| {scores['top1']:.2%} | 100.00% |" in shown.out and "the file is empty" not in shown.err
    assert main([*command, "--data", str(colours), "--split", "all"]) == 0
    shown, scores = capsys.readouterr(), json.loads((tmp_path / "eval/scores.json").read_text())
    assert "red/00.png: the file is empty" in shown.err and shown.err.count("skipped: ") == scores["broken"]
    assert scores["pictures"] + scores["broken"] == len([*colours.glob("*/*.png")])
    some = paint(tmp_path / "some")
    for path in (some / "blue").iterdir():
        path.unlink()
    (some / "blue").rmdir()  # red is the second class here, and the third of the model
    assert main([*command, "--data", str(some)]) == 0
    scores = json.loads((tmp_path / "eval/scores.json").read_text())
    assert scores["top1"] > 0.6 and scores["pictures"] == 20  # all of them: none was trained on
    for options, told in (
        (["--data", str(colours), "--validation", "0.2"], "validation=0.2 is not allowed; choose 0.3, the share"),
        (["--data", str(paint(tmp_path / "parted/val").parent), "--split", "train"], "choose one that data="),
    ):
        assert main([*command, *options]) == 2
        assert told in capsys.readouterr().err
    (some / "red").rename(some / "pink")
    assert main([*command, "--data", str(some)]) == 2
    told = "data='some' has other classes than the model: it has the class 'pink', and the model knows blue, green, red"
    assert told in capsys.readouterr().err
    assert main(["vision", "eval", "--model", str(tmp_path)]) == 2
    assert "which has preparation.json" in capsys.readouterr().err


def test_maps_are_drawn_of_named_images(tmp_path, trained, colours, capsys):
    out = tmp_path / "maps.png"
    command = ["vision", "maps", "--model", str(trained), "--out", str(out), "--images"]
    images = [str(colours / "red/05.png"), str(colours / "blue/03.png")]
    assert main([*command, *images, "--head", "1", "--channels", "1", "0"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    for options, told in (
        ([*images, "--head", "7"], "head=7 is not allowed; choose a number from 0 to 1"),
        ([*images, "--channels", "99"], "channels=(99,) is not allowed"),
        ([*images, "--layer", "3"], "layer=3 is not allowed"),
        ([str(colours / "red/00.png")], "red/00.png' cannot be read: the file is empty"),
    ):
        assert main([*command, *options]) == 2
        assert told in capsys.readouterr().err


def test_finished_jobs_are_not_repeated_and_have_equal_parameters(tmp_path, colours, capsys, here, monkeypatch):
    out = tmp_path / "store"
    command = [*RUN, str(colours), "--out", str(out), "--epochs", "1"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "4 jobs, 0 of them finished before" in shown.err and "they differ by" in shown.err
    assert "more than" not in shown.err and "| colours, deit-tiny | Parameters |" in shown.out
    found = TASK.load(out)
    assert {(r["model"], r["seed"]) for r in found} == {(m, s) for m in ("FEM-SM", "SMAttn") for s in (0, 1)}
    assert all(abs(r["parameter_count"] / 3000 - 1) < 0.01 and r["broken"] == 2 for r in found)
    monkeypatch.setattr(Fitting, "fit", None)
    assert main(command) == 0
    assert "4 jobs, 4 of them finished before" in capsys.readouterr().err
    assert main(["vision", "export", "--results", str(out), "--out", str(tmp_path / "all.json")]) == 0
    assert TASK.load(tmp_path / "all.json") == found


def test_a_training_that_diverges_is_recorded_with_the_best_weights_before(tmp_path, colours, monkeypatch, here):
    def diverges(self, classes, engine):
        self.results.append([{**self.evaluate(self.model)[0], "step": 0, "seconds": 0.0}])
        self.best.enough([])
        raise FloatingPointError("the loss is nan at step 3")

    monkeypatch.setattr(Fitting, "fit", diverges)
    assert main([*RUN, str(colours), "--out", str(tmp_path), "--models", "SMAttn", "--seeds", "1"]) == 0
    (found,) = TASK.load(tmp_path)
    assert found["diverged"] == "the loss is nan at step 3" and found["best_step"] == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--models FEM", "model='FEM' is not allowed; choose one of SMAttn, SMAttn+C, "),
        ("--models GLA GLA", "models=('GLA', 'GLA') is not allowed; choose different ones"),
        ("--models DeltaNet", "model='DeltaNet' is not allowed; choose one of SMAttn, "),
        ("--preset tiny", "preset='tiny' is not allowed; choose one of deit-tiny"),
        ("--image-size 9", "image_size=9 is not allowed; choose a multiple of patch_size=4"),
        ("--width 9", "dim=9 is not divisible by heads=2"),
        ("--parameters 7", "parameters=7 is not allowed; choose at least"),
        ("--seeds 0", "seeds=0"),
        ("--seed -1", "seed=-1"),
        ("--epochs 0", "epochs=0"),
        ("--warmup-epochs 9", "warmup_epochs=9.0 is not allowed; choose 0 to 4 epochs"),
        ("--lr 0", "lr=0.0"),
        ("--ema 1", "ema=1.0"),
        ("--drop-path 1", "drop_path=1.0"),
        ("--eval-crop 0", "eval_crop=0.0"),
        ("--validation 1", "validation=1.0"),
        ("--workers -1", "workers=-1"),
        ("--data nowhere", "data='nowhere' is no folder; choose digits"),
        ("--label-column label", "label_column='label' is not allowed; choose None"),
    ],
)
def test_wrong_options_are_refused_before_any_job(tmp_path, colours, options, told, capsys):
    assert main([*RUN, str(colours), "--out", str(tmp_path / "out"), *shlex.split(options)]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# Recipes


def recipe(*args, of=Train):
    default, rest = with_recipe_of_data(of(), args)
    return parse(of, rest, "vision", default)


def test_the_papers_recipe_is_deits():
    command = recipe("--recipe", "deit-imagenet", "--seed", "3")
    how, views = command.training, command.augmentation
    assert (how.epochs, how.warmup_epochs, how.batch, how.lr, how.weight_decay) == (
        300,
        5,
        1024,
        5e-4 * 1024 / 512,
        0.05,
    )
    assert (how.drop_path, how.ema, views.repeats, command.sizes.eval_crop) == (0.1, 0.99996, 3, 0.875)
    assert (views.randaugment, views.erasing, views.mixup, views.cutmix, views.smoothing) == (9, 0.25, 0.8, 1.0, 0.1)
    classes = tuple(map(str, range(1000)))
    images = DataSet("imagenet-1k", classes, {}, "", 3)
    for preset, model, expected in (
        ("deit-tiny", "FEM-SM", 5.8e6),
        ("deit-tiny", "SMAttn", 5.7e6),
        ("deit-small", "FEM-SM", 22.3e6),
    ):
        sizes = replace(command.sizes, preset=preset)
        config = config_of(specified(model, images, 0, sizes, how, views), images)
        assert parameter_count(config) == pytest.approx(expected, rel=0.01)
        assert config.image_size == 224 and config.num_channels == 3


def test_a_warm_up_that_was_not_asked_for_is_no_longer_than_training():
    args = ["--epochs", "3"]
    assert within_epochs(recipe(*args).training, args).warmup_epochs == 3
    assert within_epochs(recipe().training, []) == recipe().training
    for given in (["--warmup-epochs", "4"], ["--warmup_epochs=4"]):
        with pytest.raises(ValueError, match=r"warmup_epochs=4\.0 is not allowed; choose 0 to 3"):
            within_epochs(recipe(*args, *given).training, [*args, *given]).validate()


@pytest.mark.parametrize("model", ENCODERS)
def test_every_model_that_is_offered_can_be_an_encoder(model):
    command, images = recipe(), DataSet("digits", tuple("0123456789"), {}, "", 1)
    spec = specified(model, images, 0, command.sizes, command.training, command.augmentation)
    assert parameter_count(config_of(spec, images)) == pytest.approx(90_000, rel=0.01)


def test_the_digits_are_compared_at_equal_parameters_and_never_mirrored():
    command = recipe(of=VisionRun)
    how, images = command.experiment, DataSet("digits", tuple("0123456789"), {}, "", 1)
    specs = [specified(m, images, 0, how.sizes, how.training, how.augmentation) for m in how.models]
    counts = [parameter_count(config_of(spec, images)) for spec in specs]
    assert len(counts) == 4 and max(counts) / min(counts) < 1.02
    assert how.augmentation.flip == 0 and recipe("--data", "digits").augmentation.shift > 0
    assert recipe("--data", "folder").augmentation.flip == 0.5 == recipe("--data=folder").augmentation.flip


# What strangers do


def test_a_saved_model_is_a_pipeline_of_transformers_with_the_same_view(trained, colours):
    classifier = Classifier.load(trained)
    paths = [*(colours / "blue").iterdir(), *(colours / "green").iterdir()]
    processor = AutoImageProcessor.from_pretrained(trained / "model")
    assert type(processor) is FEMImageProcessor
    views = Views(Files(colours, paths, torch.zeros(len(paths), dtype=torch.long)), classifier.preparation)
    ((_, pixels, _),) = views.batches(torch.arange(len(paths)), len(paths))
    shown = processor([Image.open(path) for path in paths], return_tensors="pt")["pixel_values"]
    assert torch.equal(shown, pixels)
    assert torch.equal(processor(np.asarray(Image.open(paths[0])))["pixel_values"], pixels[:1])
    turned = Image.open(paths[0])
    turned.getexif()[0x0112] = 3
    assert torch.equal(processor(turned)["pixel_values"], processor(turned.rotate(180))["pixel_values"])
    for wrong in (np.zeros((3, 8, 8), dtype=np.uint8), np.zeros((8, 8, 3))):
        with pytest.raises(ValueError, match="allowed is uint8"):
            processor(wrong)
    answers = pipeline("image-classification", model=str(trained / "model"))([str(path) for path in paths])
    with torch.no_grad():
        chosen = classifier.model(pixel_values=pixels).logits.argmax(-1).tolist()
    assert [answer[0]["label"] for answer in answers] == [classifier.classes[label] for label in chosen]
    grey = FEMImageProcessor(8, 1, 1.0, (0.5,), (0.5,))
    for image in (Image.open(paths[0]), np.zeros((9, 9, 1), dtype=np.uint8)):
        assert grey(image)["pixel_values"].shape == (1, 1, 8, 8)


def test_a_run_that_is_overwritten_leaves_nothing(tmp_path, colours, capsys):
    out, whole = tmp_path / "out", tmp_path / "whole"
    for name in ("blue", "green"):
        shutil.copytree(colours / name, whole / name)
    command = ["--out", str(out), "--epochs", "1", "--overwrite"]
    assert main([*TRAIN, str(colours), *command]) == 0
    assert {"broken.jsonl", "maps.png"} < {path.name for path in out.iterdir()}
    capsys.readouterr()
    assert main([*TRAIN, str(whole), "--model", "SMAttn", *command]) == 0
    assert "could not be read" not in capsys.readouterr().out
    assert not {"broken.jsonl", "maps.png"} & {path.name for path in out.iterdir()}


def test_links_to_nowhere_are_named_and_skipped(tmp_path, colours, capsys):
    shutil.copytree(colours, tmp_path / "data")
    (tmp_path / "data/green/dead.png").symlink_to(tmp_path / "nowhere")
    assert main([*TRAIN, str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--epochs", "1"]) == 0
    assert "green/dead.png: No such file" in capsys.readouterr().err


def test_processes_that_read_ahead_change_no_score(colours, monkeypatch):
    monkeypatch.setattr(views_module, "REMEMBERED", 0)
    paths = sorted(colours.glob("*/*.png"))
    model = nn.Linear(3, 3)
    model.config = SimpleNamespace(num_labels=3)
    monkeypatch.setattr(
        model, "forward", lambda pixel_values: SimpleNamespace(logits=pixel_values.mean((-1, -2))), raising=False
    )
    found = []
    sent = []  # what goes from process to process: few large tensors, each of which is an open file
    monkeypatch.setattr(views_module, "stacked", lambda views: sent.append(len(views)) or stacked(views))
    for workers in (0, 2):
        views = Views(Files(colours, paths, torch.arange(len(paths)) % 3), Preparation(8, 3))
        predictions = predicted(model, views, 7, "test", workers)
        found.append((predictions.numbers, predictions.logits, sorted(views.broken)))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2] and len(found[0][2]) == 2 and max(sent) == 7


def test_maps_show_each_image_once(tmp_path, trained, colours, monkeypatch):
    drawn = []
    monkeypatch.setattr(Views, "read", lambda self, number: drawn.append(number))
    main(["vision", "maps", "--model", str(trained), "--data", str(colours), "--out", str(tmp_path / "m.png")])
    assert drawn == [*range(6)]  # all that there are
    drawn.clear()
    options = ["--count", "3", "--out", str(tmp_path / "m.png")]
    main(["vision", "maps", "--model", str(trained), "--data", str(colours), *options])
    assert drawn == [0, 2, 4]


def test_shown_images_are_of_all_classes():
    labels = torch.tensor([0] * 7 + [1] * 5 + [2] * 3)
    assert spread(labels, 3) == [0, 7, 12] and spread(labels, 5) == [0, 1, 7, 8, 12] and spread(labels[:2], 5) == [0, 1]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ("inspect {trained} --text a", "is a model of images; see `femixer vision maps`"),
        ("vision maps --model {trained} --data {colours} --out {out}/m.pdf", "choose a file that ends in .png"),
        ("vision eval --model {trained} --data datasets:", "data='datasets:' is not allowed"),
        ("vision eval --model {trained} --data ''", "data='' is not allowed"),
        ("vision train --lr inf --out {out}", "lr=inf is not allowed"),
    ],
)
def test_what_does_not_fit_is_said(args, told, trained, colours, tmp_path, capsys):
    given = shlex.split(args.format(trained=trained, colours=colours, out=tmp_path))
    assert main(given) == 2
    assert told in capsys.readouterr().err
