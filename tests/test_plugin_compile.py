"""compile: once for training, once for evaluation, plain where nothing can be compiled."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from gptfast_plugins.activation_checkpointing import ActivationCheckpointing
from gptfast_plugins.compile import Compile, JointLoss, compile_loss, explain
from plugin_helpers import enabled
from torch._dynamo.utils import counters

from gptfast.contract.tiny import Rig, build_rig
from gptfast.device.machine import find_machine
from gptfast.errors import GptfastError, Refused
from gptfast.host import registry
from gptfast.host.registry import discover
from gptfast.model import GPT
from gptfast.profile import ModelConfig
from gptfast.run.folder import Run
from gptfast.run.generate import Sampling, generate_tokens

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parent.parent


@pytest.fixture
def rig() -> Iterator[Rig]:
    with build_rig({"compile": {"backend": "eager"}}, machine=None, found=discover()) as rig:
        yield rig


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("optimizer", [False, True])
def test_nothing_is_compiled_twice(rig: Rig, tmp_path: Path, optimizer: bool) -> None:
    """Over steps with another learning rate, micro-batches, evaluations, texts and saves."""
    profile = rig.profile(
        {"compile": {"backend": "eager", "optimizer": optimizer}},
        train__steps=8,
        train__micro_batch=2,
        train__eval_interval=2,
        train__save_interval=2,
        train__warmup_steps=3,
        train__sample_interval=4,
        train__sample_tokens=8,
    )
    run = Run.create(tmp_path / "run", profile_toml=profile.to_toml())
    trainer, recorder = rig.trainer(profile, run=run)
    counters.clear()
    with trainer:
        trainer.run()
        assert graphs() == 2 + optimizer
        rates = {type(group["lr"]) for group in trainer.optimizer.param_groups}
        assert rates == {torch.Tensor if optimizer else float}
    resumed, _ = rig.trainer(profile.replace({"plugins": {}}), run=run, checkpoint=run.latest())
    with resumed:
        assert {type(group["lr"]) for group in resumed.optimizer.param_groups} == {float}
    assert recorder.losses[-1] < recorder.losses[0]
    plain = rig.train(rig.profile({}, train__steps=8, train__micro_batch=2, train__warmup_steps=3))
    assert max(abs(a - b) for a, b in zip(recorder.losses, plain.losses, strict=True)) < 1e-5


def test_the_update_of_two_optimizers_is_compiled_too(rig: Rig) -> None:
    tables = {"muon": {}, "compile": {"backend": "eager", "joint": False, "optimizer": True}}
    compiled = rig.train(rig.profile(tables))
    plain = rig.train(rig.profile({"muon": {}}))
    assert rig.difference(compiled.losses, plain.losses) < 1e-4


def test_two_runs_in_one_process_do_not_share_what_they_compiled(rig: Rig) -> None:
    """torch keeps eight versions of a function and then gives up: each run starts at none."""
    counters.clear()
    for count in (1, 2):
        rig.train(rig.profile(train__steps=1))
        assert graphs() == 2 * count


def test_text_is_written_by_the_plain_model() -> None:
    """A cache that grows would be compiled for each of its lengths."""
    model = tiny_model()
    prompt = [1, 2, 3]
    expected = written(model, prompt)
    compile_loss(model, lambda function: torch.compile(function, backend="eager"))
    counters.clear()
    assert written(model, prompt) == expected
    assert graphs() == 0
    batch = torch.tensor([prompt])
    model(batch, batch)
    assert graphs() == 1
    torch.compiler.reset()


def written(model: GPT, prompt: list[int]) -> list[int]:
    return list(
        generate_tokens(
            model,
            prompt,
            max_new_tokens=8,
            sampling=Sampling(),
            generator=torch.Generator().manual_seed(0),
            forward_scope=nullcontext,
        )
    )


def tiny_model(*, tied_head: bool = True) -> GPT:
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16, "vocab_size": 61}
    return GPT(ModelConfig(**shape, tied_head=tied_head))


def test_names_and_copies_stay_those_of_the_model() -> None:
    model = tiny_model()
    names = list(model.state_dict())
    compile_loss(model, lambda function: torch.compile(function, backend="eager"))
    assert list(model.state_dict()) == names
    twin = copy.deepcopy(model)
    batch = torch.arange(12).view(2, 6)
    before = twin(batch, batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(batch, batch), before)
    assert not torch.equal(model(batch, batch), before)
    torch.compiler.reset()


def test_a_failing_compiler_is_one_line(rig: Rig) -> None:
    trainer, _ = rig.trainer(rig.profile({"compile": {"backend": "no_such_backend"}}))
    with pytest.raises(GptfastError) as caught, trainer:
        trainer.run()
    assert "no_such_backend" in str(caught.value)
    assert "use --without compile" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_inductor_buries_is_dug_out() -> None:
    denied = PermissionError(13, "Permission denied", "/cache/x")
    wrapped = torch._dynamo.exc.BackendCompilerFailed(torch.compile, denied, None)
    assert explain(wrapped).startswith("/cache/x: Permission denied: set TORCHINDUCTOR_CACHE_DIR")
    assert explain(RuntimeError("first\n\nsecond")) == "RuntimeError: first"


# loss and gradients as one graph ---------------------------------------------------------------


def jointly(model: GPT, notes: list[str], backend: str = "aot_eager") -> GPT:
    """The model with loss and gradients as one graph."""

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)

    def joint(plain: Callable[..., torch.Tensor]) -> JointLoss:
        return JointLoss(model, plain, compiler, notes.append)

    compile_loss(model, compiler, jointly=joint)
    return model


def gradients(model: GPT, batch: torch.Tensor, *, scale: float = 0.1) -> list[torch.Tensor]:
    model.zero_grad()
    (model(batch, batch) * scale).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("tied_head", [True, False])
def test_one_graph_gives_the_loss_and_gradients_of_autograd(tied_head: bool) -> None:
    batch = torch.arange(24).view(2, 12)
    plain = tiny_model(tied_head=tied_head)
    notes: list[str] = []
    joint = jointly(tiny_model(tied_head=tied_head), notes)
    counters.clear()
    assert joint(batch, batch).item() == pytest.approx(plain(batch, batch).item(), rel=1e-6)
    pairs = list(zip(gradients(joint, batch), gradients(plain, batch), strict=True))
    assert len(pairs) == len(list(plain.parameters()))
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert graphs() == 1
    assert not notes
    # Over micro-batches the gradients add up.
    (joint(batch, batch) * 0.1).backward()
    torch.testing.assert_close(joint.wte.weight.grad, 2 * pairs[0][0], rtol=1e-4, atol=1e-6)
    torch.compiler.reset()


def test_where_gradients_are_not_wanted_or_not_in_float32_there_are_two_graphs() -> None:
    """Autograd leaves autocast for the backward pass; one graph would be inside of it."""
    notes: list[str] = []
    model, batch = jointly(tiny_model(), notes, "eager"), torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert model(batch, batch).grad_fn is None
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_joint(model(batch, batch))
    assert not is_joint(copy.deepcopy(model)(batch, batch))
    assert is_joint(model(batch, batch))
    assert not notes
    torch.compiler.reset()


def is_joint(loss: torch.Tensor) -> bool:
    assert loss.grad_fn is not None
    return type(loss.grad_fn).__name__ == "KnownBackward"


def test_what_cannot_be_one_graph_is_two_and_says_so() -> None:
    """A checkpointed block hangs on hooks that no functional gradient knows."""
    notes: list[str] = []
    model, batch = tiny_model(), torch.arange(12).view(2, 6)
    wanted = gradients(model, batch)
    ActivationCheckpointing(ActivationCheckpointing.Options()).wrap_model(model)
    found = gradients(jointly(model, notes), batch)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    gradients(model, batch)
    (note,) = notes
    assert note.startswith("compile: forward and backward are two graphs here: ")
    torch.compiler.reset()


# where nothing can be compiled -----------------------------------------------------------------

PROBE = """
from gptfast.device.machine import find_machine
from gptfast_plugins.compile import Compile
support = Compile(Compile.Options()).supports(find_machine("cpu"))
print(support.ok, support.reason)
"""


def probe(*command: str, **environment: str) -> CompletedProcess[str]:
    return subprocess.run(
        [*command, sys.executable, "-c", PROBE],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )


def test_no_compiler_is_a_no_with_its_name(tmp_path: Path) -> None:
    """CMP-01."""
    out = probe(PATH="/nonexistent", CXX="", TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).stdout
    assert out.startswith("False a trial compilation failed: ")
    assert "No working C++ compiler found" in out
    assert out.count("\n") == 1


def test_a_cache_that_cannot_be_written_is_a_no_with_its_folder(tmp_path: Path) -> None:
    """CMP-02."""
    out = probe(TORCHINDUCTOR_CACHE_DIR="/dev/null/x").stdout
    assert out.startswith("False a trial compilation failed: /dev/null/x: Not a directory")
    assert out.count("\n") == 1


def test_a_read_only_cache_is_a_no_with_its_folder(tmp_path: Path) -> None:
    """CMP-02: root writes everywhere, so it gives that power up first."""
    as_anybody: list[str] = []
    if os.geteuid() == 0:
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            pytest.skip("setpriv, to give up root's power, is not installed")
        as_anybody = [setpriv, "--bounding-set=-dac_override,-dac_read_search"]
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    out = probe(*as_anybody, TORCHINDUCTOR_CACHE_DIR=str(folder)).stdout
    assert out.startswith(f"False a trial compilation failed: {folder}")
    assert "Permission denied" in out


@pytest.mark.parametrize("required", [False, True])
def test_a_profile_that_skips_refuses_only_what_is_required(required: bool) -> None:
    planned = [enabled("compile", Compile, backend="no_such_backend", required=required)]
    machine = find_machine("cpu")
    if required:
        with pytest.raises(Refused, match=r"compile is required and .*no_such_backend"):
            registry.select(planned, machine, unsupported="skip")
    else:
        selection = registry.select(planned, machine, unsupported="skip")
        assert [skipped.name for skipped in selection.skipped] == ["compile"]
        assert "no_such_backend" in selection.skipped[0].reason


def test_inductor_keeps_its_claim(rig: Rig) -> None:
    support = Compile(Compile.Options()).supports(rig.machine)
    if not support.ok:
        pytest.skip(support.reason)
    compiled = rig.train(rig.profile({"compile": {}}))
    plain = rig.train(rig.profile({}))
    assert rig.difference(compiled.losses, plain.losses) <= 1e-5 < Compile.tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_keeps_its_claim_on_a_gpu(mode: str) -> None:
    plugins = {"compile": {"mode": mode}}
    with build_rig(plugins, machine=find_machine("cuda"), found=discover()) as rig:
        compiled = rig.train(rig.profile(train__micro_batch=2))
        plain = rig.train(rig.profile({}, train__micro_batch=2))
    assert rig.difference(compiled.losses, plain.losses) <= Compile.tolerance
