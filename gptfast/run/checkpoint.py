"""A checkpoint on disk: complete or absent, safe to load, readable without gptfast.

`step-000500/` holds `model.safetensors` (plain parameter names), `trainer.pt` (optimizer, random
state, plugins; read with `weights_only=True`), `tokenizer.json` and `meta.json`. It is written
under a temporary name, synced and renamed. Nothing read from disk executes code, and what a disk
has damaged is refused: both large files carry a checksum. Imports no torch until it needs it, so
that runs are listed at once.
"""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptfast.errors import GptfastError, Refused
from gptfast.files import replace_folder, sync

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FORMAT = 1
WRAPPERS = ("_orig_mod.", "module.")
"""Prefixes that torch.compile and DistributedDataParallel put before parameter names."""
TRAINER_KEYS = {"progress", "optimizer", "random", "plugins"}
UNPICKLING_ERRORS = (
    pickle.UnpicklingError,
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What reading a pickle that nobody pickled raises. Source: documentation of `pickle`."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint folder and its description."""

    folder: Path
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.meta["step"])

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Raises Refused where `folder` is not a checkpoint that this version reads."""
        path = folder / "meta.json"
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Refused(f"{folder} is not a checkpoint: {path.name}: {_reason(error)}") from error
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            found = meta.get("format") if isinstance(meta, dict) else meta
            raise Refused(f"{path}: format {found!r}, this version reads {FORMAT}: update gptfast")
        if not _describes_a_run(meta):
            raise Refused(f"{path}: does not describe a run: use an older checkpoint")
        return cls(folder, meta)

    def check(self) -> None:
        """Read all that a resumed run reads.

        Raises:
            Refused: a file is missing or damaged.
        """
        self.tokenizer_definition()
        self.tensors()
        self.load_trainer()

    def tokenizer_definition(self) -> dict[str, Any] | None:
        path = self.folder / "tokenizer.json"
        try:
            definition = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Refused(f"{path}: {_reason(error)}") from error
        return definition if isinstance(definition, dict) else None

    def load_model(self, model: torch.nn.Module) -> None:
        """Fill `model` with the saved parameters.

        Raises:
            Refused: the file is damaged, or its tensors are not those of `model`.
        """
        load_tensors(model, self.tensors(), source=str(self.folder / "model.safetensors"))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of `model.safetensors`, on the CPU."""
        from safetensors import SafetensorError, safe_open

        path = self.folder / "model.safetensors"
        try:
            path.open("rb").close()  # safetensors has one reason for all: no such file
            with safe_open(path, framework="pt") as file:
                saved = (file.metadata() or {}).get("crc32")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
        except (OSError, SafetensorError) as error:
            raise Refused(f"{path}: {_reason(error)}: use an older checkpoint") from error
        # A file from elsewhere has no checksum.
        if saved is not None and saved != _crc32(tensors):
            raise Refused(
                f"{path}: damaged, its weights are not those that were saved: use an older "
                "checkpoint"
            )
        return tensors

    def load_trainer(self) -> dict[str, Any]:
        """Optimizer, random and plugin state, on the CPU.

        Raises:
            Refused: the file is damaged, or would run code, or is something else.
        """
        import torch

        path = self.folder / "trainer.pt"
        try:
            with zipfile.ZipFile(path) as archive:
                # torch writes these checksums and does not read them.
                damaged = archive.testzip()
            if damaged is not None:
                raise Refused(f"{path}: damaged at {damaged}: use an older checkpoint")
            state = torch.load(path, map_location="cpu", weights_only=True)
        except UNPICKLING_ERRORS as error:
            raise Refused(f"{path}: {_reason(error)}: use an older checkpoint") from error
        if not isinstance(state, dict) or not state.keys() >= TRAINER_KEYS:
            raise Refused(f"{path}: holds no state of a training: use an older checkpoint")
        return state


def _describes_a_run(meta: dict[str, Any]) -> bool:
    try:
        profile, data = meta["profile"], meta["data"]
        tables = (meta["plugins"], profile["model"], profile["train"], profile["plugins"])
        texts = (data["path"], data["fingerprint"])
    except (KeyError, TypeError):
        return False
    return (
        isinstance(meta.get("step"), int)
        and all(isinstance(table, dict) for table in tables)
        and all(isinstance(text, str) for text in texts)
    )


def _crc32(tensors: Mapping[str, Tensor]) -> str:
    """Checksum of the bytes of all tensors, on the CPU, in the order of their names."""
    import torch

    crc = 0
    for _, tensor in sorted(tensors.items()):
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def load_tensors(model: torch.nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Copy `tensors` into `model`, whatever wrapper prefixes their names carry.

    Raises:
        Refused: names or shapes differ; up to five of each are listed.
    """
    plain = {strip_wrappers(name): tensor for name, tensor in tensors.items()}
    expected = model.state_dict()
    missing = sorted(expected.keys() - plain.keys())
    extra = sorted(plain.keys() - expected.keys())
    shapes = [
        f"{name} {tuple(plain[name].shape)} -> {tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & plain.keys())
        if plain[name].shape != expected[name].shape
    ]
    faults = [
        f"{label}: {', '.join(found[:5])}{' ...' if len(found) > 5 else ''}"
        for label, found in (("lacks", missing), ("unknown", extra), ("other shape", shapes))
        if found
    ]
    if faults:
        raise Refused(
            f"{source} is not this model: {'; '.join(faults)}: load it with the profile it was "
            "trained with"
        )
    model.load_state_dict(plain)


def strip_wrappers(name: str) -> str:
    while name.startswith(WRAPPERS):
        name = name.removeprefix("_orig_mod.").removeprefix("module.")
    return name


def save_checkpoint(
    folder: Path,
    *,
    model: Mapping[str, Tensor],
    trainer: Mapping[str, Any],
    tokenizer: Mapping[str, Any] | None,
    meta: Mapping[str, Any],
) -> Checkpoint:
    """Write a checkpoint that appears under `folder` complete or not at all.

    Raises:
        GptfastError: the disk is full or not writable; names the bytes needed. What stood under
            `folder` before is still there.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = folder.with_name(f".{folder.name}.tmp")
    described = {"format": FORMAT, **meta}
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.items()}
        path = temporary / "model.safetensors"
        save_file(tensors, path, metadata={"format": "pt", "crc32": _crc32(tensors)})
        with (temporary / "trainer.pt").open("wb") as file:  # torch's own would hide the reason
            torch.save(dict(trainer), file)
        shutil.copymode(temporary / "trainer.pt", path)  # safetensors lets only the owner read
        (temporary / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
        (temporary / "meta.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
        for path in temporary.iterdir():
            sync(path)
        sync(temporary)
        replace_folder(temporary, folder)
    except (OSError, SafetensorError, RuntimeError) as error:
        needed = sum(tensor.nbytes for tensor in _tensors_in([dict(model), dict(trainer)]))
        raise GptfastError(
            f"{folder}: cannot save ({_reason(error)}): about {needed:,} bytes are needed; "
            "free disk space, then --resume, or start again where nothing was saved yet"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # also after Ctrl-C; renamed: not there
    return Checkpoint(folder, described)


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    import torch

    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors_in(value)


def _reason(error: Exception) -> str:
    """The first line of an error, in which libraries bury what happened."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error.__context__, OSError):  # torch raises its own over that of the disk
        return _reason(error.__context__)
    if isinstance(error, pickle.UnpicklingError):
        return "it cannot be read without running what it holds"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
