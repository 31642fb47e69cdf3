"""How the mixers of a task's models are made, as options that all tasks have on their command line."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from femixer.mixer import PARTS
from femixer.models.block import options_of
from femixer.options import check, given
from femixer.priors import prior_class, value_of

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
    """Options of FreeEnergyMixer that the rows of the paper's tables do not fix."""

    start: Literal["paper", "prior"] | None = None
    """Initialization: paper, all projections N(0, 0.02) (the default); prior, as the prior's mean read."""
    readout: Literal["free_energy", "posterior_mean"] | None = None
    """Read of mixers with L: the free energy (the default), or the posterior mean at beta_max."""
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


FORMS = "option=value (slots=64 heads=4), or one JSON object ('{\"slots\": 64}')"


@dataclass(frozen=True)
class Rivals:
    """Options of the baselines among the models."""

    mixer_options: tuple[str, ...] = ()
    """Options of baselines (docs/baselines.md), for those models that take them: slots=64 heads=4, or as JSON
    '{"slots": 64}'."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Those that a row (fields of FEMConfig) with one mixer has itself."""
        own = (row.get("mixer_options") or {}).get(row["mixer"], {})
        return cls(tuple(f"{name}={value}" for name, value in own.items()))

    @property
    def values(self) -> dict[str, Any]:
        """Option -> value; the last one counts."""
        found: dict[str, Any] = {}
        for text in self.mixer_options:
            found |= _object(text) if text.lstrip().startswith("{") else _pair(text)
        return found

    def fitting(self, row: Mapping[str, Any]) -> Self:
        """What the mixers of a row take."""
        known = {option for mixer in mixers_of(row) for option in options_of(mixer)}
        taken = {name: value for name, value in self.values.items() if name in known}
        return replace(self, mixer_options=(json.dumps(taken),) if taken else ())

    def fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """`mixer_options` of FEMConfig: the row's own, changed by what is given and fits it; nothing where both are
        empty."""
        options = {mixer: dict(own) for mixer, own in (row.get("mixer_options") or {}).items()}
        for mixer in mixers_of(row):
            taken = {name: value for name, value in self.values.items() if name in options_of(mixer)}
            if taken:
                options[mixer] = {**options.get(mixer, {}), **taken}
        return {"mixer_options": options} if options else {}

    def validate(self, *rows: Mapping[str, Any]) -> None:
        """Raise a ValueError if an option is given that no mixer of the rows takes."""
        known = {mixer: options_of(mixer) for row in rows for mixer in mixers_of(row) if options_of(mixer)}
        has = "; ".join(f"{mixer}: {', '.join(options)}" for mixer, options in known.items())
        for name in self.values:
            used = any(name in options for options in known.values())
            check(used, "mixer_options", name, f"options of the models' baselines ({has or 'there are none'})")


def mixers_of(row: Mapping[str, Any]) -> Sequence[str]:
    mixer = row.get("mixer", "fem")
    return [mixer] if isinstance(mixer, str) else [*dict.fromkeys(mixer)]


def _pair(text: str) -> dict[str, Any]:
    name, equals, value = text.partition("=")
    check(bool(name and equals and value), "mixer_options", text, FORMS)
    return {name: value_of(value)}


def _object(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError:
        raise ValueError(f"mixer_options={text!r} is not allowed; choose {FORMS}") from None
