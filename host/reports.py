"""The report of an accelerated model, as JSON values and as text."""

from __future__ import annotations

from typing import Any

from .binding import binding_of
from .runtime import runtime

EARLIER = 10
"""Lines on earlier runs in the text; the JSON has them all."""


def report_of(patcher: Any) -> dict[str, Any]:
    """What is known of `patcher`'s runs; `accelerated` is False when the model does not go through the dispatcher."""
    binding = binding_of(patcher)
    if binding is None:
        return {"accelerated": False, "backend": None, "entries": [], "builds": [], "offer": ""}
    return {"accelerated": True, **runtime().report(binding.model_of(patcher).source.label)}


def _heading(entry: dict[str, Any]) -> str:
    patched = f", patched weights {entry['patches']}" if entry["patches"] else ""
    return f"{entry['model']} [{entry['shape']}]{patched}"


def _path(entry: dict[str, Any]) -> str:
    if entry["precision"]:
        return f"{entry['backend']} in {entry['precision']} on {entry['device']}"
    return "cuda (ComfyUI's own PyTorch, whatever device it uses)"


def _entry_lines(entry: dict[str, Any]) -> list[str]:
    lines = [_heading(entry), f"  ran on {_path(entry)}: {entry['why']}"]
    times = []
    if entry["engine_step_ms"] is not None:
        times.append(f"engine {entry['engine_step_ms']:.1f} ms")
    if entry["torch_step_ms"] is not None:
        times.append(f"PyTorch {entry['torch_step_ms']:.1f} ms")
    calls = f"{entry['run_engine_calls']} calls on an engine, {entry['run_torch_calls']} on PyTorch"
    total = f"{entry['engine_calls']} and {entry['torch_calls']} since the start"
    lines.append(f"  {calls} ({total})" + (f"; a step: {', '.join(times)}" if times else ""))
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
    latest = max((entry["run"] for entry in report["entries"]), default=0)
    for entry in report["entries"]:
        if entry["run"] == latest:
            lines.extend(_entry_lines(entry))
    earlier = [entry for entry in report["entries"] if entry["run"] != latest]
    if earlier:
        lines.append("earlier runs, their latest first:")
    for entry in sorted(earlier, key=lambda e: -int(e["run"]))[:EARLIER]:
        counted = f"{entry['engine_calls']} calls on an engine, {entry['torch_calls']} on PyTorch"
        lines.append(f"  {_heading(entry)}: {_path(entry)}; {counted}")
    for build in report["builds"]:
        lines.append(f"build of {build['label']} for {build['backend']}: {build['text']}")
    lines.append(f"configuration {report['config']}")
    lines.append(f"engines {report['cache']}")
    if report["journal"]:
        lines.append(f"log {report['journal']}")
    return "\n".join(lines)
