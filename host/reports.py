"""The report of an accelerated model, as JSON values and as text."""

from __future__ import annotations

from typing import Any

from .binding import binding_of
from .runtime import runtime


def report_of(patcher: Any) -> dict[str, Any]:
    """What is known of `patcher`'s runs; `accelerated` is False when the model does not go through the dispatcher."""
    binding = binding_of(patcher)
    if binding is None:
        return {"accelerated": False, "backend": None, "entries": [], "builds": [], "offer": ""}
    return {"accelerated": True, **runtime().report(binding.model_of(patcher).source.label)}


def _entry_lines(entry: dict[str, Any]) -> list[str]:
    precision = f" in {entry['precision']} on {entry['device']}" if entry["precision"] else " (ComfyUI's own PyTorch)"
    lines = [f"{entry['model']} [{entry['shape']}]", f"  ran on {entry['backend']}{precision}: {entry['why']}"]
    times = []
    if entry["engine_step_ms"] is not None:
        times.append(f"engine {entry['engine_step_ms']:.1f} ms")
    if entry["torch_step_ms"] is not None:
        times.append(f"PyTorch {entry['torch_step_ms']:.1f} ms")
    calls = f"{entry['engine_calls']} calls on the engine, {entry['torch_calls']} on PyTorch"
    lines.append(f"  {calls}" + (f"; a step: {', '.join(times)}" if times else ""))
    if entry["proof_db"] is not None:
        lines.append(f"  the engine's first output agreed with PyTorch's: {entry['proof_db']:.1f} dB")
    if entry["offer"]:
        lines.append(f"  {entry['offer']}")
    for backend, reasons in entry["rejected"].items():
        codes = entry["codes"][backend]
        # of a backend this version does not have, nothing else is worth reading; the JSON keeps it all
        shown = [reasons[codes.index("not-implemented")]] if "not-implemented" in codes else reasons
        lines.extend(f"  not {backend}: {reason}" for reason in shown)
    lines.extend(f"  fell back: {reason}" for reason in entry["fallbacks"])
    return lines


def as_text(report: dict[str, Any]) -> str:
    """The report for people, one line per fact."""
    if not report["accelerated"]:
        return "This model is not accelerated: load it with a Kitchen loader, or put Accelerate Model in between."
    lines: list[str] = []
    if report["config_problem"]:
        lines.append(f"Configuration: {report['config_problem']}")
    if not report["entries"]:
        lines.append("Nothing has run yet. Connect the sampler's output to `after` to report on its run.")
    for entry in report["entries"]:
        lines.extend(_entry_lines(entry))
    for build in report["builds"]:
        lines.append(f"build of {build['label']} for {build['backend']}: {build['text']}")
    lines.append(f"configuration {report['config']}")
    lines.append(f"engines {report['cache']}")
    if report["journal"]:
        lines.append(f"log {report['journal']}")
    return "\n".join(lines)
