"""Tasks of lm-evaluation-harness by name: its own, and local ones from YAML files with their data beside them."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from femixer.optional import require
from femixer.options import check

EXAMPLES = Path(__file__).parent / "examples"
"""Tasks that come with femixer; they need no download."""


@dataclass(frozen=True)
class Request:
    """A task or group to evaluate; shots: None for the task's own."""

    name: str
    shots: int | None = None


class Catalog:
    """Finds tasks by name and loads them, which is when their data is read or downloaded."""

    def __init__(self, folders: Sequence[Path], names: Iterable[str]) -> None:
        """`folders` are searched for YAML files, besides the examples; the harness' own tasks only if one of `names`
        is not found there, since reading their 14,000 files takes seconds."""
        for folder in folders:
            check(folder.is_dir(), "include_path", str(folder), "an existing folder with YAML files of tasks")
        manager = require("lm_eval.tasks", "eval").TaskManager
        local = [str(folder.resolve()) for folder in (EXAMPLES, *folders)]
        with _quiet():
            self.manager = manager(include_path=local, include_defaults=False)
            if not all(name in self.manager.task_index for name in names):
                self.manager = manager(include_path=local)
        _find_data_beside_yaml(self.manager)

    def requests(self, shots: Mapping[str, int | None]) -> list[Request]:
        """Name -> shots as requests, with a tag replaced by its tasks. Unknown names are an error."""
        requests: dict[str, Request] = {}
        for name, number in shots.items():
            entry = self.manager.task_index.get(name)
            if entry is None:
                near = difflib.get_close_matches(name, self.manager.all_tasks, n=3)
                hint = f"did you mean {', '.join(near)}?" if near else "`lm_eval ls tasks` lists the harness' own"
                raise ValueError(f"tasks={name!r} is unknown; {hint}")
            members = sorted(entry.tags) if name in self.manager.all_tags else [name]
            requests.update({member: Request(member, number) for member in members})
        return list(requests.values())

    def load(self, request: Request) -> tuple[dict[str, Any], Any | None]:
        """The tasks of a request by name, ready to evaluate, and the group that they form (None for a single task)."""
        with _quiet():
            loaded = self.manager.load([request.name])
        for task in loaded["tasks"].values():
            if request.shots is not None:
                task.set_config(key="num_fewshot", value=request.shots)
            elif task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=1234)  # the harness' own default
        return loaded["tasks"], loaded["groups"].get(request.name)


def _find_data_beside_yaml(manager: Any) -> None:
    """Let `data_files` of a task name files beside its YAML file; the harness looks in the working directory only."""
    factory = manager._factory
    original = factory._load_full_config

    def located(entry: Any, overrides: Any = None) -> dict[str, Any]:
        config = original(entry, overrides)
        options = config.get("dataset_kwargs")
        if entry.yaml_path and isinstance(options, dict) and "data_files" in options:
            files = _located(options["data_files"], Path(entry.yaml_path).parent)
            config["dataset_kwargs"] = {**options, "data_files": files}
        return config

    factory._load_full_config = located


def _located(files: Any, folder: Path) -> Any:
    """`files` (a name, or a list or mapping of names) with those that exist in `folder` given in full."""
    if isinstance(files, dict):
        return {split: _located(names, folder) for split, names in files.items()}
    if isinstance(files, list):
        return [_located(name, folder) for name in files]
    return str(folder / files) if (folder / files).exists() else files


@contextmanager
def _quiet() -> Iterator[None]:
    """The harness warns of every task that it finds twice; a local one is meant to replace the harness' own."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
