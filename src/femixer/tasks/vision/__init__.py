"""Image classification: images from folders and data sets, augmentation, training, tables and posterior maps.

docs/vision.md says what is done by default and why.
"""

from femixer.tasks.runner import Task

RECORD = {
    **dict.fromkeys(("model", "dataset", "preset", "fingerprint"), str),
    **dict.fromkeys(("seed", "classes", "parameter_count", "broken"), int),
    **dict.fromkeys(("top1", "top5", "loss", "validation_top1", "seconds", "eval_crop"), float),
    **dict.fromkeys(("fields", "augmentation"), dict),
    "training": {"lr": float, "weight_decay": float},
    "diverged": (str, None),
    "environment": {"femixer": str},
}
TASK = Task(
    "vision",
    format="vision 1",
    run="femixer.tasks.vision.task:VisionRun",
    table_help="results of run, beside the paper's",
    record=RECORD,
    others={
        "train": ("femixer.tasks.vision.task:train", "a classifier from images, or from digits that need none"),
        "eval": (
            "femixer.tasks.vision.evaluate:evaluate",
            "a trained classifier on any images: accuracy and confusion",
        ),
        "maps": ("femixer.tasks.vision.evaluate:maps", "which patches each channel of a trained classifier reads"),
    },
)
main = TASK.main
