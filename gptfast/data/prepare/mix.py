"""Sources with weights: `a.txt:0.7 b.jsonl:0.3`.

A weight is the share of a source in the characters of the data file, of training and validation
alike; only their proportions count. Nothing is repeated: the source that is used up first, for its
weight, sets the size, and the rest of the others is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gptfast.errors import Refused


@dataclass(frozen=True)
class Ingredient:
    """A source and its share."""

    name: str
    weight: float


def parse(values: Sequence[str]) -> list[Ingredient]:
    """What stands behind `--mix`; a name may have colons, the weight is behind the last.

    Raises:
        Refused: no weight, one that is no number above 0, a source twice.
    """
    ingredients: list[Ingredient] = []
    for value in values:
        name, colon, written = value.rpartition(":")
        if not (name and colon):
            raise Refused(f"--mix {value}: has no weight: write {value or 'SOURCE'}:0.5, say")
        if name in [ingredient.name for ingredient in ingredients]:
            raise Refused(f"--mix {value}: {name} is in it twice: give it one weight")
        ingredients.append(Ingredient(name, _weight(written, value)))
    return ingredients


def _weight(written: str, value: str) -> float:
    try:
        weight = float(written)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise Refused(
            f"--mix {value}: the weight {written or 'after the colon'} is no number above 0: write "
            "the share of the source in the text, as in a.txt:0.7"
        )
    return weight
