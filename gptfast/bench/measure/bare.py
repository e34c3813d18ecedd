"""What the trainer is measured against: the loop that somebody would write by hand for a profile
without plugins. And what the hooks cost where there are none.

The bare loop reads the same windows, so its losses are the trainer's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from gptfast.data.batches import StoreWindows
from gptfast.data.store import Store
from gptfast.data.windows import WindowOrder
from gptfast.host.hooks import Hooks
from gptfast.model import GPT
from gptfast.optim import build_adamw, lr_factor
from gptfast.plugin import Machine, Profile, Stepped, Update


def bare_loop(profile: Profile, *, store: Store, machine: Machine) -> Callable[[], Tensor]:
    """A call that does one step and gives its loss, a scalar on the device."""
    train, device = profile.train, machine.device
    torch.manual_seed(train.seed)
    model = GPT(profile.model).to(device).train()
    parameters = list(model.parameters())
    optimizer = build_adamw(model, train)
    block_size = profile.model.block_size
    order = WindowOrder(train.seed, "train", store.n_tokens("train"), block_size)
    windows = StoreWindows(store, order, train.batch_size)
    n_targets = train.batch_size * block_size
    step = 0

    def one_step() -> Tensor:
        nonlocal step
        step += 1
        tokens = windows.read(step).tokens.to(device, non_blocking=True)
        total = torch.zeros((), device=device)
        for part in torch.split(tokens, train.windows_per_micro):
            loss = model(part[:, :-1], part[:, 1:]) / n_targets
            loss.backward()
            total += loss.detach()
        if train.grad_clip > 0:
            nn.utils.clip_grad_norm_(parameters, train.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate * lr_factor(train, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return one_step


def hooks_us(*, steps: int = 2000, rounds: int = 9) -> float:
    """Microseconds that the hooks of a step with one micro-batch take where no plugin has any.

    The median over rounds, less what as many turns of an empty loop take.
    """
    hooks = Hooks([], note=lambda line: None)
    nothing = torch.zeros(())
    update = Update(1, nothing, nothing)
    event = Stepped(1, 1, nothing, nothing, 0.0, 1, True)

    def with_hooks() -> None:
        for _ in range(steps):
            with hooks.micro_scope(last=True), hooks.forward_scope():
                pass
            hooks.before_step(update)
            hooks.step(event)

    def without() -> None:
        for _ in range(steps):
            pass

    taken = [_seconds(with_hooks) - _seconds(without) for _ in range(rounds)]
    return median(taken) / steps * 1e6


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
