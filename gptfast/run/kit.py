"""What a run and all its parts work with."""

from __future__ import annotations

from dataclasses import dataclass

from gptfast.data.store import Store
from gptfast.host.hooks import Hooks
from gptfast.plugin import Machine
from gptfast.report import Listener
from gptfast.run.folder import Run


@dataclass(frozen=True)
class Kit:
    """What a run works with.

    Attributes:
        hooks: the enabled plugins.
        machine: where it runs.
        store: the tokens.
        run: the folder to keep it in; None keeps nothing.
        listener: told what happens.
    """

    hooks: Hooks
    machine: Machine
    store: Store
    run: Run | None
    listener: Listener
