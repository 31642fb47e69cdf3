"""How the free energy mixers of a task's models are made, as options that all tasks share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from femixer.mixer import PARTS
from femixer.options import check, given
from femixer.priors import prior_class

FIELDS = {"temperature": "mixer_temperature"}
"""Names in FEMConfig, where they are others."""
NEEDS = {
    "start": "a free energy mixer",
    "readout": "a free energy mixer with L",
    "temperature": "a free energy mixer with L",
    "budget": "a free energy mixer with queries and keys",
}


@dataclass(frozen=True)
class Mixing:
    """Options of FreeEnergyMixer that a row of the paper's tables leaves open."""

    start: Literal["paper", "prior"] | None = None
    """How free energy mixers start: all maps N(0, 0.02) (by default), or as the mean read of their prior."""
    readout: Literal["free_energy", "posterior_mean"] | None = None
    """What mixers with L read: the free energy (by default), or the mean under the posterior at beta_max."""
    temperature: Literal["learned", "fixed"] | None = None
    """Inverse temperature of mixers with L: learned per channel (by default), or fixed at 1."""
    budget: Literal["attention", "balanced"] | None = None
    """Width of queries and keys: attention's (by default), or that of the values."""

    def fitting(self, row: Mapping[str, Any]) -> Self:
        """What fits a row (fields of FEMConfig), which may be a baseline, without L, or without queries and keys."""
        fem = "fem" in listed(row.get("mixer", "fem"))
        with_l = fem and "L" in row.get("parts", PARTS)
        with_keys = fem and any(prior_class(name).queries_and_keys for name in listed(row.get("prior", "softmax")))
        return replace(
            self,
            start=self.start if fem else None,
            readout=self.readout if with_l else None,
            temperature=self.temperature if with_l else None,
            budget=self.budget if with_keys else None,
        )

    def fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Of FEMConfig: what is given and fits a row."""
        return {FIELDS.get(name, name): value for name, value in given(**vars(self.fitting(row))).items()}

    def validate(self, *rows: Mapping[str, Any]) -> None:
        """Raise a ValueError if something is given that fits none of the rows."""
        for name, value in given(**vars(self)).items():
            used = any(getattr(self.fitting(row), name) is not None for row in rows)
            check(used, name, value, f"models of which one has {NEEDS[name]}")


def listed(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names
