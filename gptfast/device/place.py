"""Which of a run's processes this one is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gptfast.errors import Refused


@dataclass(frozen=True)
class Place:
    """One process among those that train together, a device each.

    Attributes:
        rank: its number, from 0, which keeps the run and speaks.
        world: how many there are.
        local_rank: its number on its machine: the index of its GPU.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Place:
        """As torchrun tells each process that it starts.

        Raises:
            Refused: the variables are not numbers, or do not agree.

        Source: https://docs.pytorch.org/docs/stable/elastic/run.html
        """
        names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        texts = {name: environ.get(name, least) for name, least in names.items()}
        if not all(text.isdecimal() for text in texts.values()):
            wrong = next(name for name, text in texts.items() if not text.isdecimal())
            raise Refused(
                f"environment: {wrong} = {texts[wrong]!r} is no number: start several processes "
                "with torchrun, or unset it"
            )
        place = cls(int(texts["RANK"]), int(texts["WORLD_SIZE"]), int(texts["LOCAL_RANK"]))
        if place.rank >= max(1, place.world):
            raise Refused(
                f"environment: RANK = {place.rank} is not below WORLD_SIZE = {place.world}: start "
                "several processes with torchrun, or unset both"
            )
        return place


ALONE = Place()
