"""What a mixer reads: prior, posteriors, temperatures, and the figure that shows them."""

from femixer.inspection.inspection import Inspection, inspect_mixer

__all__ = ["Inspection", "inspect_mixer"]
