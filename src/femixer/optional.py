"""Packages that only some parts need: imported on first use, with an error that says how to install them."""

import importlib
import logging
import sys
from types import ModuleType

CHATTY = ("torchao", "torch.utils._pytree")
"""transformers imports torchao wherever it is installed, and these warn then about parts that no command uses."""


class MissingExtra(ImportError):
    """A package of one of femixer's extras is not installed."""


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, a package (or a submodule of one) that comes with `pip install "femixer[extra]"`.

    Only the absence of the package itself is turned into `MissingExtra`. An installed package that fails to import
    is broken, and its own error says more than ours would.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        raise MissingExtra(
            f'{package} is needed here and is not installed; install it with: pip install "femixer[{extra}]"'
        ) from None


def quiet() -> None:
    """No warnings of CHATTY packages in this process, unless Python is in its development mode."""
    for name in () if sys.flags.dev_mode else CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
