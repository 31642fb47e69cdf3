"""Saving and loading without transformers' progress bars and reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def without_bars() -> Iterator[None]:
    """transformers draws a bar for every file it writes or reads, which would break up ours."""
    was = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was:
            logging.enable_progress_bar()


@contextmanager
def without_reports() -> Iterator[None]:
    """transformers reports at length what it could not load, where we raise one line."""
    was = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(was)
