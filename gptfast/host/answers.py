"""Answers that were found on this machine, each in a file named after all that it depends on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptfast.files import replace_text


@dataclass(frozen=True)
class Answer:
    """Where the answer to `asked` is kept.

    Attributes:
        folder: of all answers of a kind.
        asked: what the answer depends on, as JSON holds it.
    """

    folder: Path
    asked: dict[str, Any]

    @property
    def file(self) -> Path:
        digest = hashlib.sha256(json.dumps(self.asked, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:16]}.json"

    def keep(self, found: dict[str, Any]) -> None:
        """Keep what was found, in place of what was found before.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_text(self.file, json.dumps({**found, "asked": self.asked}, indent=1))

    def known(self) -> dict[str, Any]:
        """What was kept last; nothing where it is damaged or answers something else."""
        try:
            kept = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return kept if isinstance(kept, dict) and kept.get("asked") == self.asked else {}
