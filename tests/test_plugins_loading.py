"""Plugins that bring windows to the model or choose what happens when: each claim is tried."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from gptfast_plugins.accumulate import Accumulate
from gptfast_plugins.eval_cadence import EvalCadence, affordable_tokens
from gptfast_plugins.loader import Loader, LoaderOptions, LoaderSource
from gptfast_plugins.prefetch import Prefetch, PrefetchSource
from gptfast_plugins.resident import Resident, gather, to_device
from plugin_helpers import enabled, found

from gptfast.contract.tiny import Outcome, Rig, build_rig, require_equal_tensors
from gptfast.data.batches import StoreWindows, WindowSource
from gptfast.data.store import Store
from gptfast.data.windows import WindowOrder
from gptfast.errors import GptfastError, Refused
from gptfast.plugin import Batch, Evaluated, Parts, Plugin, Profile, Source, Stepped, Want
from gptfast.profile import TrainConfig
from gptfast.run.folder import Run

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="needs /proc to see a process that lives on"
)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    known = found(
        loader=Loader,
        prefetch=Prefetch,
        resident=Resident,
        accumulate=Accumulate,
        eval_cadence=EvalCadence,
    )
    with build_rig({}, machine=None, found=known) as built:
        yield built


@pytest.fixture
def windows(inputs: Path) -> Iterator[StoreWindows]:
    """312 windows of 64 tokens in steps of 8: an epoch is 39 steps."""
    with Store.open(inputs / "hdf5" / "ok_u16_ramp20000.h5") as store:
        order = WindowOrder(seed=7, split="train", n_tokens=20_000, block_size=64)
        yield StoreWindows(store, order, batch_size=8)


def loader_source(windows: StoreWindows, **options: Any) -> LoaderSource:
    return LoaderSource(WindowSource(windows), options=LoaderOptions(**options), pin_memory=False)


def require_steps(source: Source, windows: StoreWindows, steps: range) -> None:
    """The source gives these steps, in order and to the bit."""
    for step in steps:
        assert source.step == step
        batch, right = source.next(), windows.read(step)
        assert batch.step == step
        assert np.array_equal(batch.starts, right.starts)
        assert batch.tokens.dtype == torch.int64
        assert torch.equal(batch.tokens.cpu(), right.tokens)


@pytest.fixture(scope="module")
def bare(rig: Rig) -> Outcome:
    """A run without plugins, with dropout."""
    return rig.train(rig.profile({}, model__dropout=0.1))


# one claim for all ways to the windows ----------------------------------------------------

WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "loader-0": {"loader": {"workers": 0}},
    "loader-1": {"loader": {"workers": 1}},
    "loader-2": {"loader": {"workers": 2}},
    "loader-4": {"loader": {"workers": 4, "prefetch_factor": 1}},
    "prefetch-1": {"prefetch": {"depth": 1}},
    "prefetch-4": {"prefetch": {"depth": 4}},
    "resident": {"resident": {}},
    "loader-prefetch": {"loader": {"workers": 2}, "prefetch": {}},
    "prefetch-loader": {"prefetch": {}, "loader": {"workers": 2}},
    "eval-cadence": {"eval-cadence": {}},
}


@pytest.mark.parametrize("way", WAYS)
def test_no_bit_changes_and_a_resume_goes_on_where_it_stopped(
    way: str, rig: Rig, bare: Outcome, tmp_path: Path
) -> None:
    """Dropout is on, so that a plugin that draws from the global generator is found out."""
    profile = rig.profile(WAYS[way], model__dropout=0.1)
    whole = rig.train(profile)
    assert whole.losses == bare.losses
    require_equal_tensors(whole.weights, bare.weights, what=way)

    run = Run.create(tmp_path / "run", profile_toml=profile.to_toml())
    rig.train(profile, run=run, until=3)
    again = Run.resumed(tmp_path / "run")
    rest = rig.train(profile, run=again, checkpoint=again.latest())
    assert rest.losses == bare.losses[3:]
    require_equal_tensors(rest.weights, bare.weights, what=way)


def test_prefetch_works_around_the_loader_whatever_the_profile_says(rig: Rig) -> None:
    for names in (("loader", "prefetch"), ("prefetch", "loader")):
        trainer, _ = rig.trainer(rig.profile({name: {} for name in names}))
        with trainer:
            assert isinstance(trainer.source, PrefetchSource)
            assert isinstance(trainer.source.inner, LoaderSource)


# loader -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_loader_gives_every_step_once_and_in_order(workers: int, windows: StoreWindows) -> None:
    source = loader_source(windows, workers=workers)
    require_steps(source, windows, range(1, 45))
    source.seek(100)
    require_steps(source, windows, range(100, 104))
    source.seek(2)
    require_steps(source, windows, range(2, 4))
    source.close()
    source.close()


def test_workers_repeat_no_window_and_no_epoch(windows: StoreWindows) -> None:
    """LDR-02."""
    source = loader_source(windows, workers=4)
    first, second = ([source.next().starts for _ in range(39)] for _ in range(2))
    source.close()
    assert sorted(np.concatenate(first)) == [64 * i for i in range(312)]
    later = np.concatenate(second)[:311]  # the second epoch has one window fewer
    assert len(np.unique(later)) == 311
    assert not np.array_equal(np.concatenate(first)[:311], later)


@dataclass(frozen=True)
class TellingWindows:
    """In place of its starts a step tells who read it: (process, owner of the file's handle)."""

    real: StoreWindows

    @property
    def tokens(self) -> np.ndarray:
        return self.real.tokens

    @property
    def block_size(self) -> int:
        return self.real.block_size

    def starts(self, step: int) -> np.ndarray:
        return self.real.starts(step)

    def read(self, step: int) -> Batch:
        if step == 7:
            raise GptfastError("data.h5: another program holds its lock")
        batch = self.real.read(step)
        pids = [os.getpid(), self.real.store._owner_pid]
        return replace(batch, starts=np.array(pids))


def telling_source(windows: StoreWindows, **options: Any) -> LoaderSource:
    source = loader_source(windows, **options)
    source.windows = TellingWindows(windows)
    return source


def test_each_worker_opens_the_file_itself(windows: StoreWindows) -> None:
    """H5-05."""
    windows.read(1)  # the parent has it open before the workers are made
    source = telling_source(windows, workers=2, start_method="fork")
    readers = [tuple(source.next().starts) for _ in range(4)]
    source.close()
    assert all(process == owner for process, owner in readers)
    assert readers[0] == readers[2] != readers[1] == readers[3]
    assert os.getpid() not in {process for process, _ in readers}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_workers_error_keeps_its_one_line_and_its_place(
    workers: int, windows: StoreWindows
) -> None:
    source = telling_source(windows, workers=workers)
    for _ in range(6):
        source.next()
    with pytest.raises(GptfastError, match=r"^data\.h5: another program holds its lock$"):
        source.next()
    source.close()


@needs_proc
def test_closing_ends_the_workers_and_leaves_the_signals_alone(windows: StoreWindows) -> None:
    handler, before = signal.getsignal(signal.SIGCHLD), processes_below(os.getpid())
    source = loader_source(windows, workers=2)
    source.next()
    assert signal.getsignal(signal.SIGCHLD) is handler
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGINT, signal.SIGTERM}
    assert len(processes_below(os.getpid()) - before) == 2
    source.close()
    assert processes_below(os.getpid()) <= before


def processes_below(pid: int) -> set[int]:
    """Living children of a process."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it ended meanwhile
            continue
        if int(parent) == pid and state != "Z":
            found.add(int(stat.parent.name))
    return found


@contextmanager
def training(folder: Path, *sets: str, before: tuple[str, ...] = ()) -> Iterator[Any]:
    """`gptfast train` in a process group of its own, with a tiny model and a loader."""
    with h5py.File(folder / "data.h5", "w") as file:
        file["tokens"] = np.arange(20_000, dtype=np.uint16) % 61
    (folder / "gptfast.toml").write_text(
        """
[model]
n_layer = 1
n_head = 1
n_embd = 8
block_size = 64
vocab_size = 61
[data]
path = "data.h5"
[train]
steps = 100000
batch_size = 4
log_interval = 1
save_interval = 0
[plugins]
loader = { workers = 4 }
"""
    )
    options = [option for one in sets for option in ("--set", one)]
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "gptfast", "train", "--run", "one", *options],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def told(errors: str) -> list[str]:
    """The lines on stderr but those about a machine of few cores and data without `val`."""
    expected = ("cores here", "has no validation split")
    return [line for line in errors.splitlines() if not any(known in line for known in expected)]


def wait_for_steps(process: Any, folder: Path, steps: int) -> None:
    metrics = folder / "runs" / "one" / "metrics.jsonl"
    end = time.monotonic() + 60
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < steps:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "it does not train"
        time.sleep(0.05)


def test_a_signal_while_a_step_is_logged_saves_that_step(rig: Rig, tmp_path: Path) -> None:
    """Then it is already decided that this step needs no checkpoint."""
    run = Run.create(tmp_path / "run", profile_toml="")
    trainer, recorder = rig.trainer(rig.profile({}, train__eval_interval=0), run=run)
    recorder.logged = lambda record: trainer.state.interrupt("SIGINT")
    with trainer:
        trainer.run()
    assert run.steps() == [trainer.progress.step] == [1]


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_stops_in_order(number: signal.Signals, tmp_path: Path) -> None:
    """LDR-04: what a terminal's Ctrl-C and a cluster's pre-emption do."""
    with training(tmp_path) as process:
        wait_for_steps(process, tmp_path, 5)
        assert len(processes_below(process.pid)) == 4
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 128 + number
        assert "Traceback" not in errors
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
        assert Run.resumed(tmp_path / "runs" / "one").latest().step >= 5


def test_more_workers_than_cores_are_said(rig: Rig) -> None:
    notes: list[str] = []
    trainer, _ = rig.trainer(rig.profile({"loader": {"workers": 1000}}))
    trainer.hooks._note = notes.append
    with trainer:
        assert ["1000 are more than the" in note for note in notes] == [True]


@needs_proc
def test_a_killed_worker_is_named(tmp_path: Path, tally: Callable[..., None]) -> None:
    """LDR-04."""
    with training(tmp_path) as process:
        wait_for_steps(process, tmp_path, 5)
        worker = min(processes_below(process.pid))
        os.kill(worker, signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 1
        assert len(told(errors)) == 1
        assert str(worker) in errors
        assert "plugins.loader.workers" in errors
        assert "Traceback" not in errors
        tally("kills survived")
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)


def test_spawned_workers_train_without_a_word(tmp_path: Path) -> None:
    """LDR-05: no warning about pinned memory, no start-method error."""
    with training(
        tmp_path,
        "train.steps=3",
        "plugins.loader.workers=1",
        "plugins.loader.start_method=spawn",
    ) as process:
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
        assert told(errors) == []


def small_shared_memory(size: str) -> tuple[str, ...]:
    return (
        *("unshare", "--map-root-user", "--mount", "sh", "-c"),
        f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$0" "$@"',
    )


def may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return (
        subprocess.run([*small_shared_memory("64k"), "true"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not may_mount(), reason="only root or user namespaces can make /dev/shm small")
@pytest.mark.parametrize(("size", "works"), [("16k", False), ("256k", True)])
def test_little_shared_memory_is_enough_or_named(size: str, works: bool, tmp_path: Path) -> None:
    """LDR-03: only locks lie there; here a step is 520 kB."""
    sets = ("train.steps=2", "train.batch_size=1000")
    with training(tmp_path, *sets, before=small_shared_memory(size)) as process:
        _, errors = process.communicate(timeout=90)
        if works:
            assert process.returncode == 0, errors
        else:
            assert process.returncode == 1
            assert len(told(errors)) == 1
            assert "shared memory (/dev/shm)" in errors
            assert "plugins.loader.workers = 0" in errors


# prefetch ---------------------------------------------------------------------------------


@dataclass
class CountingSource:
    """Reads of `windows`, counted; the read of step `fails_at` fails."""

    windows: StoreWindows
    fails_at: int = 0
    step: int = 1
    read: list[int] = field(default_factory=list)
    closed: int = 0

    def next(self) -> Batch:
        if self.step == self.fails_at:
            raise GptfastError("the disk is gone")
        self.read.append(self.step)
        self.step += 1
        return self.windows.read(self.step - 1)

    def seek(self, step: int) -> None:
        self.step = step

    def close(self) -> None:
        self.closed += 1


def wait_until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("depth", [1, 3])
def test_prefetch_reads_depth_steps_ahead_and_seeks(depth: int, windows: StoreWindows) -> None:
    inner = CountingSource(windows)
    source = PrefetchSource(inner, depth=depth, device=CPU)
    assert inner.read == []
    require_steps(source, windows, range(1, 6))
    wait_until(lambda: len(inner.read) == 5 + depth)
    time.sleep(0.02)
    assert inner.read == list(range(1, 6 + depth))
    source.seek(50)
    require_steps(source, windows, range(50, 53))
    source.close()
    source.close()
    assert inner.closed == 2
    assert not [thread for thread in threading.enumerate() if "prefetch" in thread.name]


def test_an_error_in_the_thread_comes_at_its_own_step(windows: StoreWindows) -> None:
    inner = CountingSource(windows, fails_at=3)
    source = PrefetchSource(inner, depth=4, device=CPU)
    require_steps(source, windows, range(1, 3))
    for _ in range(2):
        with pytest.raises(GptfastError, match="the disk is gone"):
            source.next()
    assert source.step == 3
    source.close()


@pytest.mark.gpu
def test_prefetch_copies_on_a_stream_of_its_own(windows: StoreWindows) -> None:
    """The main stream is kept busy, and memory is used again at once, while copies arrive."""
    device = torch.device("cuda")
    source = PrefetchSource(WindowSource(windows), depth=3, device=device)
    busy = torch.randn(2048, 2048, device=device)
    sums = []
    for _ in range(100):
        batch = source.next()
        assert batch.tokens.is_cuda
        busy = busy @ busy / 2048
        sums.append(batch.tokens.sum())
    source.close()
    assert [int(s) for s in sums] == [int(windows.read(i).tokens.sum()) for i in range(1, 101)]


@pytest.mark.gpu
def test_loader_pins_on_cuda(windows: StoreWindows) -> None:
    for workers in (0, 2):
        options = LoaderOptions(workers=workers)
        source = LoaderSource(WindowSource(windows), options=options, pin_memory=True)
        assert source.next().tokens.is_pinned()
        require_steps(source, windows, range(2, 6))
        source.close()


# resident ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<u4", "<i4", "<i8", "u1"])
def test_gathered_windows_are_those_of_the_array(dtype: str) -> None:
    """Ids above the signed range of their width too."""
    top = min(np.iinfo(dtype).max, 4_000_000_000)
    tokens = np.linspace(0, top, 300).astype(dtype)
    starts = np.array([236, 0, 17, 17], dtype=np.int64)
    ids = gather(to_device(tokens, CPU), torch.from_numpy(starts), 64)
    right = np.stack([tokens[start : start + 64].astype(np.int64) for start in starts])
    assert ids.dtype == torch.int64
    assert np.array_equal(ids.numpy(), right)


def test_resident_stays_off_where_the_split_is_too_large(rig: Rig) -> None:
    notes: list[str] = []
    profile = rig.profile({"resident": {"share": 1e-12}})
    trainer, recorder = rig.trainer(profile)
    trainer.hooks._note = notes.append
    with trainer:
        trainer.run()
    assert recorder.losses == rig.train(rig.profile({})).losses
    assert len(notes) == 1
    assert "takes 514 bytes" in notes[0]
    assert "resident.share" in notes[0]


@pytest.mark.parametrize("other", ["loader", "prefetch"])
def test_resident_conflicts_with_what_it_makes_pointless(other: str, rig: Rig) -> None:
    with pytest.raises(Refused, match=f"resident and {other} conflict"):
        rig.plan(rig.profile({"resident": {}, other: {}}))


@pytest.mark.gpu
def test_resident_windows_are_gathered_on_the_gpu(windows: StoreWindows) -> None:
    from gptfast_plugins.resident import ResidentSource

    device = torch.device("cuda")
    source = ResidentSource(WindowSource(windows), to_device(windows.tokens, device))
    assert source.next().tokens.is_cuda
    require_steps(source, windows, range(2, 50))


# accumulate -------------------------------------------------------------------------------


class Gradients(Plugin):
    """Keeps each step's gradients as they are before unscaling and clipping."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.seen: list[torch.Tensor] = []
        self.micros = 0

    def ready(self, parts: Parts) -> None:
        self._model = parts.raw_model

    @contextmanager
    def _keep(self, last: bool) -> Iterator[None]:
        yield
        self.micros += 1
        if last:
            self.seen.append(
                torch.cat(
                    [p.grad.flatten() for p in self._model.parameters() if p.grad is not None]
                )
            )

    def micro_scope(self, last: bool) -> AbstractContextManager[object]:
        return self._keep(last)


class Rates(Plugin):
    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.seen: list[float] = []

    def step(self, event: Stepped) -> Want:
        self.seen.append(event.learning_rate)
        return Want.NOTHING


@pytest.mark.parametrize("options", [{"micro_batch": 4}, {"steps": 4}, {"micro_batch": 1}])
def test_accumulated_gradients_and_losses_are_those_of_the_whole_batch(
    options: dict[str, int], rig: Rig
) -> None:
    """TRN-01: 8x1, 4x2, 2x4 and 1x8; a forgotten division is a factor of 2, 4 or 8."""

    def one_step(plugins: dict[str, dict[str, int]]) -> tuple[torch.Tensor, float, int]:
        spy = enabled("spy", Gradients)
        profile = rig.profile(plugins, train__batch_size=8)
        losses = rig.train(profile, extra=[spy], until=1).losses
        assert isinstance(spy.plugin, Gradients)
        return spy.plugin.seen[0], losses[0], spy.plugin.micros

    right, right_loss, _ = one_step({})
    gradients, loss, micros = one_step({"accumulate": options})
    assert micros == options.get("steps", 8 // options.get("micro_batch", 8))
    assert (gradients - right).norm() <= 1e-6 * right.norm()
    assert loss == pytest.approx(right_loss, rel=1e-6)


def test_accumulation_keeps_its_claim_over_a_run(rig: Rig) -> None:
    changes = {"train__steps": 60, "train__batch_size": 8}
    right = rig.train(rig.profile({}, **changes)).losses
    losses = rig.train(rig.profile({"accumulate": {"steps": 4}}, **changes)).losses
    assert rig.difference(losses, right) <= Accumulate.tolerance


def test_the_schedule_counts_steps_and_not_micro_batches(rig: Rig) -> None:
    """TRN-03."""

    def rates(steps: int) -> list[float]:
        spy = enabled("rates", Rates)
        profile = rig.profile(
            {"accumulate": {"steps": steps}},
            train__steps=100,
            train__warmup_steps=10,
            train__learning_rate=1e-3,
            train__min_lr=1e-5,
            train__eval_interval=0,
        )
        rig.train(profile, extra=[spy])
        assert isinstance(spy.plugin, Rates)
        return spy.plugin.seen

    seen = rates(4)
    assert seen == rates(1)
    assert len(seen) == 100
    assert seen[9] == max(seen) == 1e-3
    assert seen[99] == min(seen[9:]) == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch": 5}, "micro_batch = 5 does not divide train.batch_size = 12: use 3, 4, 6"),
        ({"steps": 5}, "steps = 5 does not divide train.batch_size = 12: use 3, 4, 6"),
        ({"steps": 100}, "steps = 100 does not divide train.batch_size = 12: use 4, 6, 12"),
        ({}, "give exactly one of them"),
        ({"steps": 2, "micro_batch": 6}, "give exactly one of them"),
        ({"steps": 0}, "steps = 0"),
    ],
)
def test_impossible_accumulation_is_refused(
    options: dict[str, int], message: str, rig: Rig
) -> None:
    with pytest.raises(Refused, match=r"plugins\.accumulate") as caught:
        rig.train(rig.profile({"accumulate": options}, train__batch_size=12))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# eval-cadence -----------------------------------------------------------------------------


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def walk(
    plugin: EvalCadence, clock: Clock, steps: range, *, of: int, step_s: float, eval_s: float
) -> list[int]:
    """Steps that were evaluated in a run in which everything takes its time."""
    plugin.ready(None)  # it does not look at the parts
    nothing = torch.zeros(())
    evaluated = []
    for step in steps:
        clock.now += step_s
        event = Stepped(step, of, nothing, nothing, 1e-3, 64, committed=True)
        if Want.EVAL in plugin.step(event):
            evaluated.append(step)
            clock.now += eval_s
            plugin.evaluated(Evaluated(step, 1.0, 64, best=True, seconds=eval_s))
    return evaluated


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_dear_evaluations_take_their_share_of_the_time_and_no_more(share: float) -> None:
    clock = Clock()
    plugin = EvalCadence(EvalCadence.Options(share=share, evaluations=500), clock=clock)
    evaluated = walk(plugin, clock, range(1, 1001), of=1000, step_s=1.0, eval_s=7.0)
    for count, step in enumerate(evaluated[1:], start=2):
        assert 7 * count <= share * (step + 7 * count)
    assert 7 * (len(evaluated) + 1) > share * (1000 + 7 * len(evaluated)) - 7


def test_cheap_evaluations_are_as_many_as_wanted_and_evenly_spread() -> None:
    clock = Clock()
    plugin = EvalCadence(EvalCadence.Options(evaluations=20), clock=clock)
    evaluated = walk(plugin, clock, range(1, 1001), of=1000, step_s=1.0, eval_s=0.5)
    assert evaluated == list(range(50, 1001, 50))


@pytest.mark.parametrize("stop", [137, 140, 500])
def test_cadence_goes_on_after_a_resume_as_if_never_stopped(stop: int) -> None:
    options = EvalCadence.Options(evaluations=100)

    def part(plugin: EvalCadence, clock: Clock, steps: range) -> list[int]:
        return walk(plugin, clock, steps, of=1000, step_s=1.0, eval_s=7.0)

    clock = Clock()
    whole = part(EvalCadence(options, clock=clock), clock, range(1, 1001))
    first = EvalCadence(options, clock=(clock := Clock()))
    evaluated = part(first, clock, range(1, stop + 1))
    second = EvalCadence(options, clock=(clock := Clock(now=1e6)))
    second.load_state(first.state())
    assert evaluated + part(second, clock, range(stop + 1, 1001)) == whole
    assert len(whole) > 5


def test_an_evaluation_scores_what_its_share_can_pay_for(rig: Rig) -> None:
    profile = rig.profile({}, train__steps=1000, train__batch_size=4)
    # 64,000 tokens are trained on; 5 % of the time is 1/19 of training's; scoring costs a third.
    assert affordable_tokens(profile, share=0.05, evaluations=10) == int(64_000 / 19 * 3 / 10)
    assert affordable_tokens(profile, share=0.05, evaluations=10**6) == 4 * 16
    assert configured(profile, evaluations=10) == (0, 1010)
    assert configured(profile, evaluations=10, max_tokens=100) == (0, 100)
    assert configured(profile.replace({"train.eval_tokens": 80})) == (0, 80)


def configured(profile: Profile, **options: Any) -> tuple[int, int | None]:
    plugin = EvalCadence(EvalCadence.Options(**options))
    train: TrainConfig = plugin.configure(profile).train
    return train.eval_interval, train.eval_tokens


def test_the_trainer_evaluates_when_the_cadence_asks(rig: Rig) -> None:
    profile = rig.profile(
        {"eval-cadence": {"share": 0.9, "evaluations": 4, "max_tokens": 20}}, train__steps=40
    )
    trainer, recorder = rig.trainer(profile)
    with trainer:
        trainer.run()
    steps = [record.step for record in recorder.evaluations]
    assert steps[0] == 10
    assert 2 <= len(steps) <= 4
    assert steps[-1] == 40
    assert {record.tokens for record in recorder.evaluations} == {20}
