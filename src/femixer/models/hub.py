"""Things by a name on the Hugging Face hub, or in a folder: found without waiting for a network that is not there."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

from huggingface_hub import constants

SECONDS = 5.0
hub_utils: Any = importlib.import_module("huggingface_hub.utils")


@functools.lru_cache(maxsize=1)
def is_offline() -> bool:
    """Whether the hub does not answer. transformers would ask it for one file after another, each several times."""
    if constants.HF_HUB_OFFLINE:
        return True
    try:
        hub_utils.get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception:  # each version of the hub's client has other errors
        return True
    return False


def only_local(source: Any) -> dict[str, Any]:
    """Options of from_pretrained: a folder is all there is, and an offline machine has what it has loaded before."""
    return {"local_files_only": Path(source).is_dir() or is_offline(), "trust_remote_code": False}


def why_not_found(name: Any) -> str:
    """Why a name gave nothing."""
    asked = "the hub does not answer, and it is not among what was loaded before" if is_offline() else "the hub says no"
    return f"there is no folder {str(name)!r}, and as a name on the hub: {asked}"
