"""Forecasting: series from files, the windows of the paper's protocol, training, tables and forecasts.

The protocol is that of the SAMoVAR work (public code: LJC-FVNR/Structural-Aligned-Mixture-of-VAR), which the paper
follows; docs/forecast.md says what that means.
"""

from femixer.tasks.runner import Task

RECORD = {
    **dict.fromkeys(("model", "dataset", "fingerprint"), str),
    **dict.fromkeys(("seed", "horizon", "lookback"), int),
    **dict.fromkeys(("mse", "mae", "validation_mse"), float),
    "fields": dict,
    "training": {"lr": float, "weight_decay": float},
    "diverged": (str, None),
    "environment": {"femixer": str},
}
TASK = Task(
    "forecast",
    format="forecast 1",
    run="femixer.tasks.forecast.task:ForecastRun",
    table="femixer.tasks.forecast.table:ForecastTabulate",
    run_help="models x data sets x horizons x seeds, as jobs of a results store",
    record=RECORD,
    others={
        "train": ("femixer.tasks.forecast.task:train", "a forecaster from a file, or from a series that needs none"),
        "cv": (
            "femixer.tasks.forecast.predict:cv",
            "cross-validation: forecasts from several cutoffs, and their errors",
        ),
        "predict": ("femixer.tasks.forecast.predict:predict", "forecast with a trained model: a CSV and a figure"),
    },
)
main = TASK.main
