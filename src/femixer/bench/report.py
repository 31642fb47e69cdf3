"""What all benchmarks share: from the command line to a measurement, its JSON file and its tables."""

from __future__ import annotations

import json
import platform
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from femixer import __version__
from femixer.bench.measure import BenchOptions, MeasureOptions, Spread, cpu_threads
from femixer.options import parse
from femixer.reporting import Table, show, write
from femixer.training import atomic

AnyOptions = TypeVar("AnyOptions", bound=BenchOptions)
AnyReport = TypeVar("AnyReport", bound="Report")
Tables = Callable[[AnyReport, bool], Iterable[Table]]
"""The tables of a report, with targets or without."""


@dataclass(frozen=True)
class Report:
    """What BENCHMARK.json holds; a benchmark adds its lists of results."""

    settings: dict[str, Any]
    environment: dict[str, Any]

    def save(self, path: Path) -> None:
        atomic.write(path, json.dumps({"benchmark": path.stem, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def read(cls: type[AnyReport], path: Path) -> AnyReport:
        content = json.loads(path.read_text(encoding="utf-8"))
        content.pop("benchmark", None)
        return _made(cls, content)


def _made(kind: Any, value: Any) -> Any:
    """A value of JSON as the dataclasses, or lists of them, that `kind` describes."""
    if is_dataclass(kind):
        kinds = typing.get_type_hints(kind)
        return kind(**{name: _made(kinds[name], each) for name, each in value.items()})  # type: ignore[operator]
    if isinstance(kind, types.UnionType):
        return value if value is None else _made(typing.get_args(kind)[0], value)
    if typing.get_origin(kind) is list:
        return [_made(typing.get_args(kind)[0], each) for each in value]
    return value


def environment(threads: int, device: str) -> dict[str, Any]:
    """What a time depends on besides the options."""
    return {
        "femixer": __version__,
        "torch": torch.__version__,
        "numba": _version("numba"),
        "python": platform.python_version(),
        "threads": threads,
        "instructions": torch.backends.cpu.get_cpu_capability() if device == "cpu" else torch.cuda.get_device_name(),
    }


def _version(package: str) -> str | None:
    """Without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@contextmanager
def resumed(
    kind: type[AnyReport], path: Path, options: MeasureOptions, overwrite: bool
) -> Iterator[tuple[AnyReport, Callable[[], None]]]:
    """The report of a file, or an empty one, to whose lists results are added, and the function that saves it then: the
    same command goes on from there. With --overwrite another file, which replaces `path` when all is measured."""
    new = path.with_suffix(".new.json")
    if overwrite:
        atomic.remove(new)
    file = new if new.exists() or (overwrite and path.exists()) else path
    with cpu_threads(options.threads) as threads:
        lists: Any = {each.name: [] for each in fields(kind) if each.name not in ("settings", "environment")}
        report = held(kind, file, kind(options.settings, environment(threads, options.device), **lists))
        yield report, lambda: report.save(file)
    report.save(path)
    if file != path:
        file.unlink()


def held(kind: type[AnyReport], path: Path, new: AnyReport) -> AnyReport:
    """What the file holds, to go on with; `new`, which holds no results, where there is none. An error where the file
    was made with other settings or in another environment than `new`."""
    if not path.exists():
        return new
    folder, advice = str(path.parent), "--overwrite starts anew, or choose another --out"
    try:
        report = kind.read(path)
        was = {**report.settings, **report.environment}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"out={folder!r} holds a {path.name} that cannot be read; {advice}") from None
    now = {**new.settings, **new.environment}
    differences = [
        f"{name} was {was.get(name)!r} and is now {now.get(name)!r}"
        for name in {**was, **now}
        if was.get(name) != now.get(name)
    ]
    if differences:
        reasons = ", ".join(differences)
        raise ValueError(f"out={folder!r} holds points measured otherwise: {reasons}; {advice}")
    return report


def measured(
    benchmark: str,
    options: BenchOptions,
    measure: Callable[[], Mapping[str, Sequence[Any]]],
    kind: type[AnyReport],
    tables: Tables[AnyReport],
    **more: Mapping[str, Any],
) -> AnyReport:
    """Measure, and write BENCHMARK.json and BENCHMARK.md. measure: gives the report's lists of results by name; more:
    what to add to `settings` or `environment`."""
    options.out.mkdir(parents=True, exist_ok=True)  # an unwritable place shows now, not after the measurement
    with cpu_threads(options.threads) as threads:
        torch.manual_seed(options.seed)
        results = measure()
    settings = {**options.settings, **more.get("settings", {})}
    report = kind(settings, {**environment(threads, options.device), **more.get("environment", {})}, **results)
    report.save(options.out / f"{benchmark}.json")
    write(options.out, [*tables(report, options.targets)], benchmark, ("md",))
    return report


def command(
    benchmark: str,
    kind: type[AnyOptions],
    args: Sequence[str],
    run: Callable[[AnyOptions], AnyReport],
    tables: Tables[AnyReport],
) -> int:
    """`femixer bench BENCHMARK`: read the options, run, show the tables."""
    options = parse(kind, args, f"bench {benchmark}")
    show(*tables(run(options), options.targets))
    print(f"Results are in {options.out}/")
    return 0


def ratio_cell(ratio: Spread | float, target: float | None = None, at_least: bool = False) -> str:
    """A ratio, with its quartiles where it has them, and beside a target whether it is kept."""
    if isinstance(ratio, Spread):
        value, text = ratio.median, f"{ratio.median:.3f} [{ratio.q1:.3f}–{ratio.q3:.3f}]"
    else:
        value, text = ratio, f"{ratio:.3f}"
    if target is None:
        return text
    sign = ("≥" if value >= target else "<") if at_least else ("≤" if value <= target else ">")
    return f"{text} {sign} {target:.2f}"


def bytes_cell(count: float | None) -> str:
    """None: of a state that does not grow with the context."""
    return "constant" if count is None else f"{count:,.0f}"


def fits(settings: Mapping[str, Any], size: Mapping[str, Any]) -> bool:
    """Whether a measurement has the size that a target is meant for."""
    return all(settings[name] == value for name, value in size.items())


def heads_of(settings: Mapping[str, Any]) -> str:
    grouped = "" if settings["kv_heads"] is None else f" ({settings['kv_heads']} for keys and values)"
    return f"{settings['heads']} heads{grouped}"


def place_of(report: Report, *words: str) -> str:
    """Where and how it was measured, for a title."""
    s, e = report.settings, report.environment
    return ", ".join([s["dtype"], *words, f"{e['threads']} threads", f"torch {e['torch']}"])
