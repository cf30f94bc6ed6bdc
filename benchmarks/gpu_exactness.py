"""Parts of `gpu_check`: tokens wherever things lie, and with work injected into the streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_runs import Check, decision_of_work, plan_of_work, run_work
from lmoffload_solver.errors import StatedError

if TYPE_CHECKING:
    import torch

LATE_SHARE = 0.2


def exactness(check: Check) -> dict[str, Any]:
    """Weights, keys and values and hidden states anywhere: the tokens of resident execution."""
    return _held_to_resident(check, lambda accelerator: accelerator)


def races(check: Check) -> dict[str, Any]:
    """The same with work injected before and after copies, in the streams that copy and in the one that computes."""
    return _held_to_resident(check, lambda accelerator: Late(accelerator, check.device))


class Late:
    """An accelerator whose copies, and now and then whose computing, wait behind products that nobody asked for."""

    def __init__(self, inner: Any, device: str) -> None:
        import random

        import torch

        self._inner, self._chance = inner, random.Random(0)
        self._burden = torch.ones(1024 if device == "cpu" else 6144, 1024 if device == "cpu" else 6144, device=device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._burn()
        self._inner.to_device(target, source)
        self._burn()

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._burn()
        self._inner.to_host(target, source)
        self._burn()

    def computing(self) -> Any:
        self._burn()
        return self._inner.computing()

    def _burn(self) -> None:
        if self._chance.random() < LATE_SHARE:
            self._burden @ self._burden


def _held_to_resident(check: Check, change: Callable[[Any], Any]) -> dict[str, Any]:
    work = check.sizes.small
    model, machine = check.model(work), check.machine
    on_device = decision_of_work(model, work, "device", "device", "device")
    resident = run_work(check, model, work, plan_of_work(check, model, machine, work, on_device), change)[0]
    equal: dict[str, bool] = {}
    close: dict[str, float] = {}
    for homes, kv, attends, hidden, depth in PLACEMENTS:
        decision = replace(decision_of_work(model, work, homes, kv, attends), hidden=hidden, prefetch_depth=depth)
        tokens, _ = run_work(check, model, work, plan_of_work(check, model, machine, work, decision), change)
        name = f"weights on {homes}, kv on {kv}, {attends} attends, hidden on {hidden}, {depth} ahead"
        same = sum(a == b for a, b in zip(resident, tokens, strict=True)) / len(tokens)
        if attends == "device":
            equal[name] = same == 1.0
        else:  # the host attends in fp32: more exact than the device, and now and then another of two close tokens
            close[name] = same
    different = [name for name, same in equal.items() if not same] + [name for name, share in close.items() if share < 0.5]
    if different:
        raise StatedError(f"Tokens differ from resident execution: {'; '.join(different)}. Close: {close}.")
    return {"equal": len(equal), "rows_equal_with_host_attention": close}


PLACEMENTS: tuple[tuple[Any, Any, Any, Any, int], ...] = (
    ("host", "device", "device", "device", 1),
    ("host", "host", "device", "host", 1),
    ("disk", "host", "device", "device", 2),
    ("disk", "disk", "device", "host", 3),
    ("mixed", "disk", "device", "host", 1),
    ("mixed", "host", "host", "device", 1),
)
