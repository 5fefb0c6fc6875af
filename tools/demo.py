"""`python dev.py demo`: one workflow through ComfyUI's own loader and through ours, on a real server, compared.

Prints a table and leaves `stock.png`, `kitchen.png` and `side_by_side.png`. Ends with status 0 only when the engine
really made the picture and the pictures agree as closely as the engine's precision promises.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import tiny_checkpoints
from .comfy_server import ComfyServer, PromptError, ServerError, end_on_sigterm
from .images import IDENTICAL_DB, Similarity, compare, side_by_side
from .workflows import STOCK, Loader, Sampling, Workflow, kitchen, txt2img

BACKEND = "openvino"

TINY = "tiny_sd15.safetensors"

SIZE, TINY_SIZE = 512, 256
"""Default width and height in pixels with a real checkpoint, and with ours, which two slow cores paint in a minute."""

THRESHOLD_DB = {"fp32": 60.0, "fp16": 40.0, "bf16": 30.0}
"""PSNR of the final picture that an engine of each precision must reach: the pack's own defaults."""

WARM_UP_SEED, TIMED_SEED = 1, 2

DRIFT = 1.15
"""Stock times that differ by more than this factor say that something else used the machine."""

ROUNDS = 20
"""Prompts to try until the engine serves one. Digests and builds need the first few."""


class DemoError(Exception):
    """Why the demo could not show what it is for, in a sentence."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What the pack has counted up to now. precision: of the engine that ran last, None before one did."""

    engine_calls: int
    torch_calls: int
    precision: str | None

    @classmethod
    def of(cls, report: dict[str, Any]) -> Counts:
        entries = report["entries"]
        served = [entry for entry in entries if entry["backend"] == BACKEND and entry["engine_calls"]]
        return cls(
            sum(entry["engine_calls"] for entry in entries),
            sum(entry["torch_calls"] for entry in entries),
            served[-1]["precision"] if served else None,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run.

    ran_on: backend and calls, as the pack counted them. step_s: median seconds a step. peak_bytes: largest resident
    memory of the server while it ran. picture: the first PNG.
    """

    ran_on: str
    step_s: float
    peak_bytes: int
    picture: bytes


@dataclass(frozen=True, slots=True)
class Job:
    """What to paint, whatever the loader."""

    ckpt: str
    size: int
    steps: int
    batch: int
    prompt: str

    def workflow(self, loader: Loader, seed: int, steps: int | None = None) -> Workflow:
        return txt2img(
            self.ckpt,
            loader,
            width=self.size,
            height=self.size,
            batch=self.batch,
            prompt=self.prompt,
            sampling=Sampling(seed=seed, steps=steps or self.steps),
        )


def say(text: str) -> None:
    """One line of progress."""
    print(f"[demo] {text}", flush=True)


def timed(server: ComfyServer, job: Job, loader: Loader, ran_on: str) -> Run:
    """Run the job with the timed seed, everything being loaded already."""
    server.reset_peak()
    history = server.run(job.workflow(loader, TIMED_SEED), timeout_s=3600)
    peak = server.peak_rss()
    return Run(ran_on, statistics.median(server.step_seconds(history)), peak, server.images(history)[0])


def wait_for_builds(server: ComfyServer, timeout_s: float = 3600.0) -> None:
    """Wait until no engine is being built, telling how far it is. Raises DemoError for a build that failed."""
    told = ""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        builds = server.report()["builds"]
        for build in builds:
            if build["state"] in ("failed", "cancelled"):
                raise DemoError(f"the engine's build {build['state']}: {build.get('text') or build['phase']}")
        active = [build for build in builds if build["state"] != "done"]
        if not active:
            return
        text = f"engine build: {active[0]['phase'] or active[0]['state']}, {active[0]['fraction']:.0%}"
        if text != told:
            say(text)
            told = text
        time.sleep(0.5)
    raise DemoError(f"the engine was not built in {timeout_s / 60:.0f} minutes")


def ready_engine(server: ComfyServer, job: Job, loader: Loader) -> None:
    """Run short prompts until the engine serves one whole. Raises DemoError when it never does."""
    for number in range(ROUNDS):
        before = Counts.of(server.report())
        # every round another seed: ComfyUI would answer the same prompt from its cache
        server.run(job.workflow(loader, WARM_UP_SEED + 1000 * number, steps=2), timeout_s=3600)
        after = Counts.of(server.report())
        if after.engine_calls > before.engine_calls and after.torch_calls == before.torch_calls:
            return
        wait_for_builds(server)
        time.sleep(0.5)
    raise DemoError(f"the engine served none of {ROUNDS} prompts: {why_not(server.report())}")


def why_not(report: dict[str, Any]) -> str:
    """The reasons the report gives against our backend."""
    reasons = [
        reason
        for entry in report["entries"]
        for reason in [*entry["rejected"].get(BACKEND, []), *map(str, entry["fallbacks"])]
    ]
    return "; ".join(dict.fromkeys(reasons)) or "the report gives no reason"


def kitchen_run(server: ComfyServer, job: Job) -> tuple[Run, Counts]:
    """The job through our loader, and what was counted during the timed run alone."""
    loader = kitchen(BACKEND)
    ready_engine(server, job, loader)
    say(f"{job.steps} steps on the engine")
    before = Counts.of(server.report())
    run = timed(server, job, loader, "")
    after = Counts.of(server.report())
    counts = replace(
        after,
        engine_calls=after.engine_calls - before.engine_calls,
        torch_calls=after.torch_calls - before.torch_calls,
    )
    total = counts.engine_calls + counts.torch_calls
    name = f"{BACKEND} {counts.precision}" if counts.engine_calls else "PyTorch"
    return replace(run, ran_on=f"{name}, {counts.engine_calls} of {total} calls on the engine"), counts


def table(stock: Run, ours: Run, alike: Similarity) -> str:
    """Both runs as text."""
    psnr = "equal" if alike.psnr_db >= IDENTICAL_DB else f"{alike.psnr_db:.1f} dB"
    rows = [
        ("loader", "ran on", "s/step", "ratio", "PSNR", "SSIM", "peak memory"),
        ("CheckpointLoaderSimple", stock.ran_on, f"{stock.step_s:.3f}", "1.00", "-", "-", _mib(stock)),
        (
            "KitchenCheckpointLoader",
            ours.ran_on,
            f"{ours.step_s:.3f}",
            f"{stock.step_s / ours.step_s:.2f}",
            psnr,
            f"{alike.ssim:.5f}",
            _mib(ours),
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _mib(run: Run) -> str:
    return f"{run.peak_bytes / (1 << 20):.0f} MiB"


def verdict(counts: Counts, alike: Similarity) -> str:
    """What is wrong with the result, in a sentence; empty when it is as promised."""
    if counts.engine_calls == 0:
        return "no call of the timed run was served by the engine"
    if counts.torch_calls:
        return f"{counts.torch_calls} calls of the timed run fell back to PyTorch"
    if counts.precision not in THRESHOLD_DB:
        return f"the report names no known precision: {counts.precision}"
    limit = THRESHOLD_DB[counts.precision]
    if alike.psnr_db < limit:
        return f"the pictures differ: PSNR {alike.psnr_db:.1f} dB, needed {limit:.0f} dB for {counts.precision}"
    return ""


def demo(options: argparse.Namespace) -> None:
    """Run it all. Raises DemoError when the result is not as promised."""
    out: Path = options.out.resolve()
    checkpoint: Path | None = options.checkpoint
    if checkpoint is None:
        say(f"checkpoint: {TINY}, random weights")
        checkpoint = tiny_checkpoints.ensure(options.comfyui, out / "models", [TINY]) / TINY
    elif not checkpoint.is_file():
        raise DemoError(f"{checkpoint} is no file")
    server = ComfyServer(options.comfyui, out / "base", options.pack)
    server.log_file.unlink(missing_ok=True)
    size = options.size or (SIZE if options.checkpoint else TINY_SIZE)
    job = Job(server.add_model(checkpoint), size, options.steps, options.batch, options.prompt)
    say(f"starting ComfyUI; its log: {server.log_file}")
    with server:
        say(f"ComfyUI's own loader: {job.steps} steps at {job.size}x{job.size}, batch {job.batch}, after a warm-up")
        server.run(job.workflow(STOCK, WARM_UP_SEED, steps=2), timeout_s=3600)
        stock = timed(server, job, STOCK, "PyTorch, stock")
        (out / "stock.png").write_bytes(stock.picture)
        say("our loader, in a fresh server so that its memory is its own")
        server.restart()
        ours, counts = kitchen_run(server, job)
        say("ComfyUI's own loader once more, to see whether the machine's speed changed meanwhile")
        server.restart()
        server.run(job.workflow(STOCK, WARM_UP_SEED, steps=2), timeout_s=3600)
        again = timed(server, job, STOCK, stock.ran_on)
        repeated = compare(stock.picture, again.picture)
        drift = max(stock.step_s, again.step_s) / min(stock.step_s, again.step_s)
        stock = replace(stock, step_s=(stock.step_s + again.step_s) / 2)
    (out / "kitchen.png").write_bytes(ours.picture)
    (out / "side_by_side.png").write_bytes(side_by_side(stock.picture, ours.picture))
    alike = compare(stock.picture, ours.picture)
    print(f"\n{table(stock, ours, alike)}\n", flush=True)
    if repeated.psnr_db < IDENTICAL_DB:
        say(f"ComfyUI's own two pictures of this seed differ: {repeated.psnr_db:.1f} dB")
    if drift > DRIFT:
        say(f"stock before and after ours differ by {drift:.2f}: something else runs here, the ratio is uncertain")
    say(f"pictures: {', '.join(str(out / name) for name in ('stock.png', 'kitchen.png', 'side_by_side.png'))}")
    wrong = verdict(counts, alike)
    if wrong:
        raise DemoError(wrong)
    say("the engine ran, and its picture is PyTorch's")
    if ours.step_s > stock.step_s:
        say("it was slower than PyTorch here: the demo asks for openvino by name, `auto` would have kept PyTorch")


def positive(text: str) -> int:
    """argparse type of a whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def pixels(text: str) -> int:
    """argparse type of a picture's side."""
    value = positive(text)
    if value % 8 or value < 64:
        raise argparse.ArgumentTypeError(f"{value} is not a multiple of 8 from 64 up")
    return value


def steps(text: str) -> int:
    """argparse type of a number of steps; the time of the first is not known, so one is too few."""
    value = positive(text)
    if value < 2:
        raise argparse.ArgumentTypeError("at least 2 steps are needed to measure one")
    return value


def main() -> int:
    """Parse the command line and run the demo. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Stock and accelerated picture side by side.")
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--size", type=pixels)
    parser.add_argument("--steps", type=steps, default=6)
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--prompt", default="a bowl of ripe oranges on a kitchen table, morning light")
    options = parser.parse_args()
    end_on_sigterm()
    try:
        demo(options)
    except KeyboardInterrupt:
        print("[demo] stopped", file=sys.stderr, flush=True)
        return 1
    except (DemoError, ServerError, PromptError, RuntimeError) as error:
        print(f"[demo] failed: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
