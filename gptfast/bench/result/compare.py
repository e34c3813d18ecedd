"""Two results side by side: two machines, two versions, two profiles.

Their rounds were never neighbours in time, so nothing cancels what changed on a machine between
them. Two things are done about it. Each interval is widened by the larger drift that the two
baselines showed within their own bench. And beside the plain ratio stands how much more a rung
brings over its own baseline there than here: the speed of the machines is not in that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gptfast.bench.result.record import Bench, Protocol, Ratio, Rung
from gptfast.bench.result.statistics import Floats, from_resampled, resampled_medians, widened


@dataclass(frozen=True)
class Pair:
    """A rung of both, or of one."""

    name: str
    a_ms: float | None
    """None: it is not there, or it cannot run."""
    b_ms: float | None
    a_reason: str | None
    """Why it cannot run there. None: it ran, or A has no such rung."""
    b_reason: str | None
    b_over_a: Ratio | None
    """How many times as fast B is."""
    gain_over_gain: Ratio | None
    """What the rung brings over the baseline in B, over what it brings in A."""


@dataclass(frozen=True)
class Comparison:
    """Two benches, rung by rung.

    Attributes:
        differences: of machine, versions and profile, (what, in A, in B).
        drift: by which the intervals were widened.
        warnings: why the times cannot be compared, a line each.
    """

    pairs: list[Pair]
    differences: list[tuple[str, str, str]]
    drift: float
    warnings: list[str]


def compare(a: Bench, b: Bench) -> Comparison:
    """B against A: above 1, B is faster."""
    drift = max(_drift(a), _drift(b))
    differences = list(_differences(a, b))
    ours, theirs = ({rung.name: rung for rung in bench.rungs} for bench in (a, b))
    names = dict.fromkeys([*(rung.name for rung in a.rungs), *(rung.name for rung in b.rungs)])
    baselines = (a.rungs[0], b.rungs[0])
    return Comparison(
        pairs=[
            _pair(name, ours.get(name), theirs.get(name), baselines, a.protocol, drift=drift)
            for name in names
        ],
        differences=differences,
        drift=drift,
        warnings=list(_warnings(a, b, differences)),
    )


def _drift(bench: Bench) -> float:
    again = bench.baseline_again
    return abs(again.drift) if again is not None else 0.0


def _pair(
    name: str,
    a: Rung | None,
    b: Rung | None,
    baselines: tuple[Rung, Rung],
    protocol: Protocol,
    *,
    drift: float,
) -> Pair:
    b_over_a = gain = None
    if a is not None and a.ran and b is not None and b.ran:
        one, other = _times(a, protocol, seed=0), _times(b, protocol, seed=1)
        b_over_a = widened(_over(one, other, protocol), drift)
        if name != baselines[0].name:
            bases = [_times(rung, protocol, seed=2 + i) for i, rung in enumerate(baselines)]
            gain = widened(_over(one.over(bases[0]), other.over(bases[1]), protocol), drift)
    return Pair(
        name,
        a_ms=a.step_ms if a else None,
        b_ms=b.step_ms if b else None,
        a_reason=a.reason if a else None,
        b_reason=b.reason if b else None,
        b_over_a=b_over_a,
        gain_over_gain=gain,
    )


@dataclass(frozen=True)
class _Times:
    """A time, its bootstrap medians, and of how many rounds they are."""

    value: float
    medians: Floats
    n: int

    def over(self, other: _Times) -> _Times:
        n = min(self.n, other.n)
        return _Times(self.value / other.value, self.medians / other.medians, n)


def _times(rung: Rung, protocol: Protocol, *, seed: int) -> _Times:
    assert rung.round_step_ms is not None, "the caller asks for rungs that ran"
    medians = resampled_medians(rung.round_step_ms, protocol, seed=seed)
    assert rung.step_ms is not None, "as above"
    return _Times(rung.step_ms, medians, len(rung.round_step_ms))


def _over(a: _Times, b: _Times, protocol: Protocol) -> Ratio:
    quotient = a.over(b)
    return from_resampled(quotient.value, quotient.medians, protocol, n=quotient.n, paired=False)


def _differences(a: Bench, b: Bench) -> Iterator[tuple[str, str, str]]:
    """What is not the same on both sides."""
    for what, in_a, in_b in (
        ("kind", a.kind, b.kind),
        ("machine", a.machine.name, b.machine.name),
        ("device", a.machine.device, b.machine.device),
        ("platform", a.machine.platform, b.machine.platform),
        ("cores", a.machine.usable_cpus, b.machine.usable_cpus),
        ("threads", a.machine.threads, b.machine.threads),
        ("driver", _driver(a), _driver(b)),
        ("cuda", a.machine.cuda, b.machine.cuda),
        ("torch", a.machine.torch, b.machine.torch),
        ("python", a.machine.python, b.machine.python),
        ("numpy", a.machine.numpy, b.machine.numpy),
        ("gptfast", a.gptfast, b.gptfast),
        ("profile", a.profile["name"], b.profile["name"]),
        *_settings(a, b),
        *_versions(a, b),
    ):
        if in_a != in_b:
            yield what, str(in_a), str(in_b)


def _driver(bench: Bench) -> str | None:
    return bench.before.gpu.driver if bench.before.gpu else None


WORK = ("model", "train")
"""Tables of a profile that say how much a step does."""


def _settings(a: Bench, b: Bench) -> Iterator[tuple[str, object, object]]:
    for name in (*WORK, "plugins"):
        ours, theirs = a.profile[name], b.profile[name]
        for key in dict.fromkeys([*ours, *theirs]):
            yield f"{name}.{key}", ours.get(key, "off"), theirs.get(key, "off")


def _versions(a: Bench, b: Bench) -> Iterator[tuple[str, object, object]]:
    """Of the plugins that both name."""
    ours, theirs = (
        {rung.plugin: f"{rung.package} {rung.version}" for rung in bench.rungs if rung.plugin}
        for bench in (a, b)
    )
    for plugin in ours.keys() & theirs.keys():
        yield f"plugin {plugin}", ours[plugin], theirs[plugin]


def _warnings(a: Bench, b: Bench, differences: list[tuple[str, str, str]]) -> Iterator[str]:
    work = [what for what, _, _ in differences if what.partition(".")[0] in WORK]
    if work:
        yield (
            f"a step is not the same work in both ({', '.join(work)} differ): compare what the "
            "rungs bring over their baselines, not the times"
        )
    yield from _other_company(a, b)
    for letter, bench in (("A", a), ("B", b)):
        for warning in bench.warnings:
            yield f"{letter}: {warning}"


def _other_company(a: Bench, b: Bench) -> Iterator[str]:
    """That rungs of one name have not the same plugins on."""
    ours, theirs = ({rung.name: rung.plugins for rung in x.rungs if rung.ran} for x in (a, b))
    other = [
        name for name in ours if name in theirs and set(ours[name] or ()) != set(theirs[name] or ())
    ]
    if other:
        only = [
            f"{', '.join(sorted(more)) or 'nothing'} only in {side}"
            for side, more in (
                ("A", _on_in(a, other) - _on_in(b, other)),
                ("B", _on_in(b, other) - _on_in(a, other)),
            )
        ]
        yield (
            f"{', '.join(other)} have not the same plugins on in both ({'; '.join(only)}): their "
            "ratios are of all that differs"
        )


def _on_in(bench: Bench, names: list[str]) -> set[str]:
    """Plugins that are on in one of these rungs."""
    return {plugin for rung in bench.rungs if rung.name in names for plugin in rung.plugins or ()}
