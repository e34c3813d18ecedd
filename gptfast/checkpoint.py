"""A checkpoint on disk: complete or absent, safe to load, readable without gptfast.

`step-000500/` holds `model.safetensors` (plain parameter names), `trainer.pt` (optimizer, random
state, plugins; read with `weights_only=True`), `tokenizer.json` and `meta.json`. It is written
under a temporary name, synced and renamed. Nothing read from disk executes code.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptfast.errors import GptfastError, Refused

FORMAT = 1
WRAPPERS = ("_orig_mod.", "module.")
"""Prefixes that torch.compile and DistributedDataParallel put before parameter names."""


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
        return cls(folder, meta)

    def tokenizer_definition(self) -> dict[str, Any] | None:
        path = self.folder / "tokenizer.json"
        try:
            definition = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Refused(f"{path}: {_reason(error)}") from error
        return definition if isinstance(definition, dict) else None

    def load_model(self, model: torch.nn.Module, *, device: torch.device) -> None:
        """Fill `model` with the saved parameters.

        Raises:
            Refused: the file is damaged, or its tensors are not those of `model`.
        """
        path = self.folder / "model.safetensors"
        try:
            tensors = load_file(path, device=str(device))
        except (OSError, SafetensorError) as error:
            raise Refused(f"{path}: {_reason(error)}: use an older checkpoint") from error
        load_tensors(model, tensors, source=str(path))

    def load_trainer(self) -> dict[str, Any]:
        """Optimizer, random and plugin state, on the CPU."""
        path = self.folder / "trainer.pt"
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise Refused(f"{path}: {_reason(error)}: use an older checkpoint") from error
        if not isinstance(state, dict) or "plugins" not in state:
            raise Refused(f"{path}: holds no state of a training: use an older checkpoint")
        return state


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
    temporary = folder.with_name(f".{folder.name}.tmp")
    described = {"format": FORMAT, **meta}
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in model.items()},
            temporary / "model.safetensors",
        )
        torch.save(dict(trainer), temporary / "trainer.pt")
        (temporary / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
        (temporary / "meta.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
        for path in temporary.iterdir():
            sync(path)
        sync(temporary)
        replace_folder(temporary, folder)
    except (OSError, SafetensorError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        needed = sum(tensor.nbytes for tensor in model.values()) * 3
        raise GptfastError(
            f"{folder}: cannot save ({_reason(error)}): about {needed:,} bytes are needed; "
            "free disk space and continue with --resume"
        ) from error
    return Checkpoint(folder, described)


def replace_folder(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`; one that stands there already is moved aside first."""
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    new.rename(folder)
    sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def replace_text(path: Path, text: str) -> None:
    """Give `path` a new content: the old one or the whole new one is there at any moment."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have the system write a file, or on POSIX a folder's entries, to the disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    """The first line of an error, in which libraries bury what happened."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
