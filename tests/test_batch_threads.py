"""batch-threads: the same loss and gradients, found by several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from gptfast_plugins.batch_threads import BatchThreads

from gptfast.device.machine import find_machine
from gptfast.model import GPT
from gptfast.plugin import Context
from gptfast.profile import ModelConfig, Profile


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@contextmanager
def shared(model: GPT, threads: int, notes: list[str] | None = None) -> Iterator[GPT]:
    """The model as the plugin leaves it, until its run ends."""
    plugin = BatchThreads(BatchThreads.Options(threads=threads))
    profile = Profile(name="test", model=model.config)
    with ExitStack() as undo:
        note = ([] if notes is None else notes).append
        plugin.setup(Context(profile, find_machine("cpu"), undo=undo, note=note))
        plugin.wrap_model(model)
        yield model


def tiny(**changes: Any) -> GPT:
    torch.manual_seed(3)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 40}
    return GPT(ModelConfig.model_validate({**shape, **changes}))


def loss_and_gradients(model: GPT, tokens: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    loss = model(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("windows", "threads"), [(6, 2), (5, 2), (7, 3), (2, 3), (1, 2)])
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_are_those_of_one_thread(windows: int, threads: int, tied: bool) -> None:
    tokens = torch.randint(0, 40, (windows, 17), generator=torch.Generator().manual_seed(1))
    alone, wanted = loss_and_gradients(tiny(tied_head=tied), tokens)
    with shared(tiny(tied_head=tied), threads) as model:
        loss, gradients = loss_and_gradients(model, tokens)
        again, once_more = loss_and_gradients(model, tokens)
    assert loss == pytest.approx(alone, rel=1e-6)
    assert len(gradients) == len(wanted) > 0
    for gradient, one in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, one, rtol=1e-5, atol=1e-7)
    assert again == loss
    assert all(torch.equal(a, b) for a, b in zip(gradients, once_more, strict=True))


def test_gradients_add_up_over_micro_batches() -> None:
    tokens = torch.randint(0, 40, (8, 17), generator=torch.Generator().manual_seed(1))
    _, whole = loss_and_gradients(tiny(), tokens)
    with shared(tiny(), 2) as model:
        for part in tokens.split(4):
            (model(part[:, :-1], part[:, 1:]) / tokens[:, 1:].numel()).backward()
        for p, gradient in zip(model.parameters(), whole, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.grad, gradient, rtol=1e-5, atol=1e-7)


def test_each_part_has_a_thread_with_one_core_and_the_modes_of_the_caller() -> None:
    """They meet at a barrier inside of the model: one after the other would wait for ever."""
    model = tiny()
    meeting = threading.Barrier(2, timeout=30)
    seen: list[tuple[int, int, bool, bool]] = []
    plain = model.token_loss

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        meeting.wait()
        seen.append(
            (
                threading.get_ident(),
                torch.get_num_threads(),
                torch.is_grad_enabled(),
                torch.is_autocast_enabled("cpu"),
            )
        )
        return plain(*args, **kwargs)

    model.token_loss = watched
    tokens = torch.randint(0, 40, (4, 17))
    with shared(model, 2):
        model(tokens[:, :-1], tokens[:, 1:])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
    assert not loss.requires_grad
    assert len({thread for thread, *_ in seen[:2]}) == 2
    assert [modes for _, *modes in seen] == [[1, True, False]] * 2 + [[1, False, True]] * 2
    assert torch.get_num_threads() == 2


def test_a_failing_part_is_the_error_and_leaves_the_threads_as_they_were() -> None:
    model = tiny()
    with shared(model, 2), pytest.raises(IndexError):
        model(torch.full((4, 16), 40), torch.zeros((4, 16), dtype=torch.int64))
    assert torch.get_num_threads() == 2


def test_with_dropout_it_is_off_and_says_so() -> None:
    notes: list[str] = []
    with shared(tiny(dropout=0.1), 2, notes) as model:
        assert "forward" not in vars(model)
    assert notes == ["batch-threads is off: threads would draw dropout in any order"]


def test_one_thread_is_refused_with_the_reason() -> None:
    plugin = BatchThreads(BatchThreads.Options())
    assert plugin.supports(find_machine("cpu")).ok
    torch.set_num_threads(1)
    support = plugin.supports(find_machine("cpu"))
    assert not support.ok
    assert "one thread" in support.reason
