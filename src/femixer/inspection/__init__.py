"""What mixers and models read: priors, posteriors, temperatures, and the figures and the page that show them."""

from femixer.inspection.inspection import Inspection, Layer, inspect_mixer, inspect_model
from femixer.inspection.page import write_page

__all__ = ["Inspection", "Layer", "inspect_mixer", "inspect_model", "write_page"]
