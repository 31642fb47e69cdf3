"""Surgery: put FEM into a transformers model that is already trained.

Importing this package teaches the Auto classes of transformers to load upgraded models.
"""

from femixer.optional import require

require("transformers", "lm")

from femixer.surgery import attention, families  # noqa: E402
from femixer.surgery.families import FAMILIES, check_ends, load, upgrade  # noqa: E402

attention.register()
families.register()

__all__ = ["FAMILIES", "check_ends", "load", "upgrade"]
