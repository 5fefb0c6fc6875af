"""The pack's main job on a real server: the same picture as the stock loader's, made by an engine that really ran."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kitchen_accel.tools.comfy_server import ComfyServer
from kitchen_accel.tools.images import compare
from kitchen_accel.tools.workflows import STOCK, Loader, Sampling, Workflow, img2img, kitchen, txt2img

from .conftest import SD15, SDXL, MakeServer

THRESHOLD_DB = 60.0
"""parity.fp32 of the default settings: what a CPU's fp32 engine promises for the final picture."""

LONG_PROMPT = ", ".join(f"a very detailed kitchen with {n} copper pans and an old oak table" for n in range(12))
"""More than 77 tokens, so that ComfyUI sends two chunks of 77."""

OURS = kitchen("openvino")


def configure(server: ComfyServer, text: str) -> None:
    """Write the server's comfy_kitchen.yaml."""
    (server.base / "user" / "comfy_kitchen.yaml").write_text(text, encoding="utf-8")


def journal(server: ComfyServer, kind: str) -> list[dict[str, Any]]:
    lines = (server.base / "user" / "kitchen.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def engines(server: ComfyServer) -> list[Path]:
    root = server.base / "models" / "kitchen_engines"
    return sorted(p for p in root.iterdir() if (p / "manifest.json").is_file()) if root.is_dir() else []


@dataclass(frozen=True)
class Calls:
    """How often engines and PyTorch ran, over all models and shapes, as the runtime counted."""

    engine: int
    torch: int

    @classmethod
    def of(cls, server: ComfyServer) -> Calls:
        entries = server.report()["entries"]
        return cls(sum(e["engine_calls"] for e in entries), sum(e["torch_calls"] for e in entries))

    def __sub__(self, other: Calls) -> Calls:
        return Calls(self.engine - other.engine, self.torch - other.torch)


def pictures(server: ComfyServer, workflow: Workflow) -> list[bytes]:
    history = server.run(workflow)
    assert "sampler" not in server.cached_nodes(history), "ComfyUI served the picture from its own cache"
    return server.images(history)


def wait_for_build(server: ComfyServer, timeout_s: float = 300.0) -> list[dict[str, Any]]:
    """The builds once there is one and none is under way."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        builds: list[dict[str, Any]] = server.report()["builds"]
        if builds and all(b["state"] in ("done", "failed", "cancelled") for b in builds):
            return builds
        time.sleep(0.1)
    raise AssertionError(f"no build ended in {timeout_s:.0f} s: {server.report()['builds']}")


@pytest.fixture(scope="module")
def blocking(make_server: MakeServer) -> Iterator[ComfyServer]:
    """A running server whose prompts wait for their engines, so that every picture is an engine's."""
    server = make_server("blocking")
    configure(server, "build: blocking\n")
    with server:
        yield server


@dataclass(frozen=True)
class Case:
    name: str
    ckpt: str
    width: int = 64
    height: int = 64
    batch: int = 1
    prompt: str = "a red kitchen"

    def workflow(self, loader: Loader) -> Workflow:
        sampling = Sampling(seed=11, steps=3)
        return txt2img(
            self.ckpt, loader, width=self.width, height=self.height, batch=self.batch, prompt=self.prompt,
            sampling=sampling,
        )  # fmt: skip


CASES = [
    Case(f"{family}-{name}", ckpt, **options)
    for family, ckpt in (("sd15", SD15), ("sdxl", SDXL))
    for name, options in (
        ("64x64", {}),
        ("batch3", {"batch": 3}),
        ("104x72", {"width": 104, "height": 72}),
        ("104x72-batch3", {"width": 104, "height": 72, "batch": 3}),
        ("long-prompt", {"prompt": LONG_PROMPT}),
    )
]


@pytest.fixture(scope="module")
def expected(blocking: ComfyServer) -> dict[str, list[bytes]]:
    """The stock loader's pictures of every case. All at once: changing the loader makes ComfyUI load the file again."""
    return {case.name: pictures(blocking, case.workflow(STOCK)) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_engine_makes_the_stock_picture(
    blocking: ComfyServer, expected: dict[str, list[bytes]], case: Case
) -> None:
    before = Calls.of(blocking)
    got = pictures(blocking, case.workflow(OURS))
    made = Calls.of(blocking) - before
    assert len(got) == len(expected[case.name]) == case.batch
    # one call a step when cond and uncond fit together, two when they do not; one more on PyTorch for the comparison
    assert made.engine >= 3, blocking.report()
    assert made.torch <= 2, blocking.report()
    for ours, theirs in zip(got, expected[case.name], strict=True):
        assert compare(theirs, ours).psnr_db >= THRESHOLD_DB


@pytest.mark.parametrize("ckpt", [SD15, SDXL])
def test_image_to_image(blocking: ComfyServer, ckpt: str) -> None:
    name = blocking.add_input("start.png", pictures(blocking, txt2img(ckpt, sampling=Sampling(seed=12)))[0])
    expected = pictures(blocking, img2img(ckpt, name))
    before = Calls.of(blocking)
    got = pictures(blocking, img2img(ckpt, name, OURS))
    assert (Calls.of(blocking) - before).engine >= 2
    assert compare(expected[0], got[0]).psnr_db >= THRESHOLD_DB


def test_the_same_seed_twice_is_the_same_picture(blocking: ComfyServer) -> None:
    """Once a shape is compared with PyTorch, every step is the engine's, so runs are bit-equal."""
    runs = []
    for other_seed in (21, 22):
        runs.append(pictures(blocking, txt2img(SD15, OURS, sampling=Sampling(seed=20)))[0])
        pictures(blocking, txt2img(SD15, OURS, sampling=Sampling(seed=other_seed)))
    assert compare(runs[0], runs[1]).max_levels == 0


def test_the_report_tells_what_ran_and_why(blocking: ComfyServer) -> None:
    history = blocking.run(txt2img(SD15, OURS, sampling=Sampling(seed=23), report=True))
    output = history["outputs"]["report"]
    found = json.loads(output["kitchen"][0])
    text = output["text"][0]
    entry = found["entries"][-1]
    assert (entry["backend"], entry["precision"], entry["device"]) == ("openvino", "fp32", "CPU")
    assert entry["engine_calls"] >= 2
    assert set(entry["rejected"]) == {"cuda", "tensorrt", "directml"}
    assert all(entry["rejected"].values())
    assert "openvino in fp32 on CPU" in text
    assert "not tensorrt: " in text
    assert "precision: fast" in text
    assert found["cache"] in text


def test_every_engine_serves_all_shapes_of_its_model(blocking: ComfyServer) -> None:
    """Two checkpoints were used at many sizes, batches and prompt lengths: two engines, no more."""
    for ckpt in (SD15, SDXL):
        pictures(blocking, txt2img(ckpt, OURS, sampling=Sampling(seed=24)))
    assert len(engines(blocking)) == 2
    assert [r["status"] for r in journal(blocking, "build")].count("done") == 2


def test_cuda_is_comfyuis_own_path(blocking: ComfyServer) -> None:
    expected = pictures(blocking, txt2img(SD15, sampling=Sampling(seed=25)))
    before = Calls.of(blocking)
    got = pictures(blocking, txt2img(SD15, kitchen("cuda"), sampling=Sampling(seed=25)))
    made = Calls.of(blocking) - before
    assert made.engine == 0
    assert made.torch >= 2
    assert compare(expected[0], got[0]).max_levels == 0


@pytest.mark.parametrize("backend", ["tensorrt", "directml"])
def test_a_backend_that_is_not_there_falls_back_and_says_why(blocking: ComfyServer, backend: str) -> None:
    expected = pictures(blocking, txt2img(SD15, sampling=Sampling(seed=26)))
    got = pictures(blocking, txt2img(SD15, kitchen(backend), sampling=Sampling(seed=26)))
    assert compare(expected[0], got[0]).max_levels == 0
    entry = blocking.report()["entries"][-1]
    assert entry["backend"] == "cuda"
    assert backend in entry["why"]
    assert "not-implemented" in entry["codes"][backend]


def test_auto_takes_the_faster_one_and_gives_both_figures(blocking: ComfyServer) -> None:
    pictures(blocking, txt2img(SD15, kitchen("auto"), sampling=Sampling(seed=27, steps=4)))
    entry = blocking.report()["entries"][-1]
    assert entry["wanted"] == "auto"
    assert "ms" in entry["why"]
    chosen = {"cuda": "PyTorch is the fastest", "openvino": "the fastest"}[entry["backend"]]
    assert chosen in entry["why"]


def test_lora_is_never_dropped(blocking: ComfyServer) -> None:
    """Patched weights have a key of their own: no engine of the plain model may serve them."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    key = "lora_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_q"
    lora = {
        f"{key}.lora_up.weight": torch.randn(320, 4, generator=generator),
        f"{key}.lora_down.weight": torch.randn(4, 320, generator=generator),
        f"{key}.alpha": torch.tensor(4.0),
    }
    file = blocking.base / "models" / "loras" / "tiny_lora.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(lora, file)

    def workflow(loader: Loader, strength: float) -> Workflow:
        made = txt2img(SD15, loader, sampling=Sampling(seed=28, steps=3))
        made["lora"] = {
            "class_type": "LoraLoaderModelOnly",
            "inputs": {"model": ["loader", 0], "lora_name": file.name, "strength_model": strength},
        }
        made["sampler"]["inputs"]["model"] = ["lora", 0]
        return made

    plain = pictures(blocking, txt2img(SD15, sampling=Sampling(seed=28, steps=3)))[0]
    for strength in (1.0, -0.5):
        expected = pictures(blocking, workflow(STOCK, strength))[0]
        got = pictures(blocking, workflow(OURS, strength))[0]
        assert compare(plain, expected).psnr_db < 40, "the LoRA changes too little to test anything"
        assert compare(expected, got).psnr_db >= THRESHOLD_DB
    back = pictures(blocking, txt2img(SD15, OURS, sampling=Sampling(seed=28, steps=3)))[0]
    assert compare(plain, back).psnr_db >= THRESHOLD_DB


def test_accelerate_node_serves_any_loader(blocking: ComfyServer) -> None:
    expected = pictures(blocking, txt2img(SD15, sampling=Sampling(seed=29)))[0]
    workflow = txt2img(SD15, sampling=Sampling(seed=29))
    workflow["ours"] = {"class_type": "KitchenAccelerate", "inputs": {"model": ["loader", 0], "backend": "openvino"}}
    workflow["sampler"]["inputs"]["model"] = ["ours", 0]
    before = Calls.of(blocking)
    got = pictures(blocking, workflow)[0]
    assert (Calls.of(blocking) - before).engine >= 2
    assert compare(expected, got).psnr_db >= THRESHOLD_DB
    # the same weights through another loader are the same engine
    assert len([e for e in engines(blocking) if json.loads((e / "manifest.json").read_text())["label"] == SD15]) >= 1


def test_a_second_start_builds_nothing(blocking: ComfyServer) -> None:
    """Last of this server's tests: after a restart the engines on disk serve at once."""
    before = [e.name for e in engines(blocking)]
    done = len(journal(blocking, "build"))
    blocking.restart()
    for ckpt in (SD15, SDXL):
        expected = pictures(blocking, txt2img(ckpt, sampling=Sampling(seed=30)))[0]
        got = pictures(blocking, txt2img(ckpt, OURS, sampling=Sampling(seed=30)))[0]
        assert compare(expected, got).psnr_db >= THRESHOLD_DB
    assert Calls.of(blocking).engine >= 4
    assert blocking.report()["builds"] == []
    assert len(journal(blocking, "build")) == done
    assert [e.name for e in engines(blocking)] == before


def test_in_the_background_the_first_prompt_does_not_wait(make_server: MakeServer) -> None:
    """The default: PyTorch serves while the engine is built, the next prompt uses it, and both give the picture."""
    with make_server("background") as server:
        expected = pictures(server, txt2img(SD15, sampling=Sampling(seed=31)))[0]
        first = pictures(server, txt2img(SD15, OURS, sampling=Sampling(seed=31)))[0]
        assert Calls.of(server).engine == 0
        assert compare(expected, first).max_levels == 0, "the first prompt is PyTorch's own"
        assert [b["state"] for b in wait_for_build(server)] == ["done"]
        pictures(server, txt2img(SD15, OURS, sampling=Sampling(seed=32)))
        second = pictures(server, txt2img(SD15, OURS, sampling=Sampling(seed=31)))[0]
        assert Calls.of(server).engine >= 4
        assert compare(expected, second).psnr_db >= THRESHOLD_DB
        kinds = [record["kind"] for record in map(json.loads, _jsonl(server))]
        assert {"decision", "build", "loaded", "proof"} <= set(kinds)


def _jsonl(server: ComfyServer) -> list[str]:
    return (server.base / "user" / "kitchen.jsonl").read_text(encoding="utf-8").splitlines()
