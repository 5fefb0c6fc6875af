"""What must never cost a prompt: a killed build, a full disk, an unwritable cache, a bad YAML, two servers at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from kitchen_accel.tools import tiny_checkpoints
from kitchen_accel.tools.comfy_server import ComfyServer, PromptError
from kitchen_accel.tools.images import compare
from kitchen_accel.tools.workflows import STOCK, Loader, Sampling, Workflow, txt2img

from .conftest import ROOT, MakeServer
from .test_kitchen import OURS, THRESHOLD_DB, Calls, configure, engines, journal, pictures, wait_for_build

T = TypeVar("T")

SMALL = "tiny_sd15_small_noclip.safetensors"
SD3 = "tiny_sd3_noclip.safetensors"


def build_children(server: ComfyServer) -> list[psutil.Process]:
    """The server's running build processes."""
    found = []
    for child in psutil.Process(server.pid).children(recursive=True):
        try:
            if any("build_child.py" in part for part in child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for(what: Callable[[], T], timeout_s: float = 120.0) -> T:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found = what()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"nothing came in {timeout_s:.0f} s")


def staging(server: ComfyServer) -> list[Path]:
    folder = server.base / "models" / "kitchen_engines" / ".staging"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def painted(loader: Loader, seed: int, ckpt: str = SMALL, width: int = 768, pooled: int = 0) -> Workflow:
    """Text to image with a conditioning from a seed: no text encoder to load, so that the tests are quick."""
    made = txt2img(ckpt, loader, sampling=Sampling(seed=seed, steps=3))
    for node, conditioning in (("positive", 1), ("negative", 2)):
        made[node] = {
            "class_type": "RandomConditioning",
            "inputs": {"seed": conditioning, "tokens": 77, "width": width, "pooled": pooled},
        }
    return made


def ours(seed: int) -> Workflow:
    return painted(OURS, seed)


def stock(server: ComfyServer, seed: int) -> bytes:
    return pictures(server, painted(STOCK, seed))[0]


@pytest.fixture
def small_server(make_server: MakeServer, comfyui: Path) -> MakeServer:
    """As `make_server`, with the checkpoints that have no text encoder."""
    models = tiny_checkpoints.ensure(comfyui, ROOT / ".demo" / "models", [SMALL, SD3])

    def make(name: str, **options: object) -> ComfyServer:
        server = make_server(name, **options)
        for checkpoint in (SMALL, SD3):
            server.add_model(models / checkpoint)
        server.add_node_file(ROOT / "tools" / "random_conditioning.py")
        return server

    return make


def test_a_killed_build_is_told_and_not_tried_in_a_loop(small_server: MakeServer) -> None:
    with small_server("killed") as server:
        expected = stock(server, 41)
        assert compare(expected, pictures(server, ours(41))[0]).max_levels == 0
        (child,) = wait_for(lambda: build_children(server))
        child.kill()
        (build,) = wait_for_build(server)
        assert build["state"] == "failed"
        assert "kill" in build["text"].lower()
        for seed in (42, 41):
            got = pictures(server, ours(seed))[0]
        assert compare(expected, got).max_levels == 0
        assert not build_children(server)
        assert len(server.report()["builds"]) == 1
        assert "build-failed" in server.report()["entries"][-1]["codes"]["openvino"]
        assert not engines(server)
        assert not staging(server)
        # and the next start tries again, since one crash can be bad luck
        server.restart()
        pictures(server, ours(43))
        assert [b["state"] for b in wait_for_build(server)] == ["done"]


def test_an_interrupt_ends_a_blocking_build_at_once_and_leaves_nothing(small_server: MakeServer) -> None:
    server = small_server("interrupted")
    configure(server, "build: blocking\n")
    with server:
        stock(server, 44)
        prompt = server.queue(ours(44))
        wait_for(lambda: build_children(server))
        began = time.monotonic()
        server.interrupt()
        with pytest.raises(PromptError) as caught:
            server.wait(prompt)
        assert caught.value.interrupted
        # the limit is a second; the rest is ComfyUI's own way of telling us
        assert time.monotonic() - began < 5
        wait_for(lambda: not build_children(server))
        wait_for(lambda: not staging(server))
        assert not engines(server)
        expected = stock(server, 45)
        assert compare(expected, pictures(server, ours(45))[0]).psnr_db >= THRESHOLD_DB
        assert Calls.of(server).engine >= 2


def test_a_killed_server_leaves_no_child_and_the_next_start_cleans_up(small_server: MakeServer) -> None:
    server = small_server("killed_server")
    server.start()
    pictures(server, ours(46))
    (child,) = wait_for(lambda: build_children(server))
    server_process = psutil.Process(server.pid)
    server_process.kill()
    psutil.wait_procs([server_process], timeout=10)
    assert not psutil.wait_procs([child], timeout=10)[1], "the build outlived its server"
    server.kill9()
    assert staging(server)
    server.start()
    pictures(server, ours(47))
    assert [b["state"] for b in wait_for_build(server)] == ["done"]
    assert not staging(server)
    server.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder nobody can write to")
def test_an_unwritable_cache_costs_nothing_but_the_engine(small_server: MakeServer) -> None:
    server = small_server("read_only")
    configure(server, "runtime_cache: /proc/kitchen_engines\n")
    with server:
        expected = stock(server, 48)
        for _ in range(2):
            got = pictures(server, ours(48))[0]
            pictures(server, ours(49))
        assert compare(expected, got).max_levels == 0
        (build,) = wait_for_build(server)
        assert build["state"] == "failed"
        assert "/proc/kitchen_engines" in build["text"]
        assert "/proc/kitchen_engines" in journal(server, "build")[-1]["message"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 24 MB: less than one engine. Skips where it may not be mounted."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root on Linux")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk_costs_nothing_but_the_engine(small_server: MakeServer, small_disk: Path) -> None:
    server = small_server("full_disk")
    configure(server, f"runtime_cache: {small_disk}/engines\n")
    with server:
        expected = stock(server, 50)
        pictures(server, ours(50))
        (build,) = wait_for_build(server)
        assert build["state"] == "failed"
        assert "space" in build["text"] or "full" in build["text"]
        pictures(server, ours(51))
        assert compare(expected, pictures(server, ours(50))[0]).max_levels == 0
        assert not [p for p in (small_disk / "engines").glob("[0-9a-f]*") if p.is_dir()]
        assert not list((small_disk / "engines" / ".staging").glob("*"))


def test_two_servers_share_one_cache(small_server: MakeServer, tmp_path: Path) -> None:
    """Both build the same engine at the same time; one entry remains, and both use it."""
    servers = [small_server(f"shared_{name}") for name in ("one", "two")]
    for server in servers:
        configure(server, f"build: blocking\nruntime_cache: {tmp_path.as_posix()}/engines\n")
        server.start()
    expected = stock(servers[0], 52)
    prompts = [server.queue(ours(52)) for server in servers]
    for server, prompt in zip(servers, prompts, strict=True):
        picture = server.images(server.wait(prompt))[0]
        assert compare(expected, picture).psnr_db >= THRESHOLD_DB
        assert Calls.of(server).engine >= 2
    entries = [p for p in (tmp_path / "engines").glob("[0-9a-f]*") if p.is_dir()]
    assert len(entries) == 1
    for server in servers:
        server.stop()


def test_a_damaged_engine_is_a_miss_and_is_built_again(small_server: MakeServer) -> None:
    server = small_server("damaged")
    configure(server, "build: blocking\n")
    with server:
        expected = stock(server, 53)
        pictures(server, ours(53))
        (entry,) = engines(server)
        server.stop()
        weights = next(p for p in entry.iterdir() if p.suffix == ".bin")
        size = weights.stat().st_size
        with weights.open("r+b") as file:
            file.seek(size // 2)
            file.write(b"\xff" * 64)
        server.start()
        assert compare(expected, pictures(server, ours(53))[0]).psnr_db >= THRESHOLD_DB
        assert [b["state"] for b in server.report()["builds"]] == ["done"]


BAD_YAML = {
    "unknown key": ("precison: fast\n", "precision"),
    "wrong type": ("build: 3\n", "background"),
    "syntax": ("backend: [cuda\n", "line"),
    "duplicate": ("build: never\nbuild: blocking\n", "twice"),
}


def test_a_bad_yaml_is_told_and_the_defaults_apply(small_server: MakeServer) -> None:
    server = small_server("bad_yaml")
    configure(server, BAD_YAML["unknown key"][0])
    with server:
        expected = stock(server, 54)
        assert compare(expected, pictures(server, ours(54))[0]).max_levels == 0
        for seed, (text, hint) in enumerate(BAD_YAML.values(), 55):
            configure(server, text)
            pictures(server, ours(seed))
            problem = server.report()["config_problem"]
            assert "comfy_kitchen.yaml, line 1" in problem or "line 2" in problem
            assert hint in problem
        # mended while the server runs: the next prompt obeys it
        configure(server, "backend:\n  default: cuda\nbuild: never\n")
        stock(server, 59)
        reported = ours(60)
        reported["report"] = {
            "class_type": "KitchenReport",
            "inputs": {"model": ["loader", 0], "after": ["sampler", 0]},
        }
        history = server.run(reported)
        assert server.report()["config_problem"] is None
        assert history["outputs"]["report"]["text"]
        assert "is fine again" in server.log_text


def test_another_cache_folder_counts_from_the_next_prompt_on(small_server: MakeServer) -> None:
    server = small_server("moved")
    configure(server, "build: blocking\n")
    with server:
        pictures(server, ours(64))
        assert len(engines(server)) == 1
        configure(server, "build: blocking\nruntime_cache: my engïnes\n")
        pictures(server, ours(65))
        found = [p for p in (server.base / "my engïnes").glob("[0-9a-f]*") if p.is_dir()]
        assert len(found) == 1
        assert server.report()["cache"] == str(server.base / "my engïnes")
        # a folder inside the pack is refused, which the report tells, and no prompt is lost
        configure(server, f"runtime_cache: {(ROOT / 'cache').as_posix()}\n")
        pictures(server, ours(66))
        assert "inside the accelerator's own folder" in server.report()["config_problem"]
        assert Calls.of(server).engine >= 6


def test_two_models_of_other_loaders_have_reports_of_their_own(small_server: MakeServer) -> None:
    server = small_server("two_models")
    configure(server, "build: never\n")
    with server:
        made = painted(STOCK, 67)
        made["other"] = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": SD3}}
        for name, source in (("one", "loader"), ("two", "other")):
            made[name] = {"class_type": "KitchenAccelerate", "inputs": {"model": [source, 0], "backend": "openvino"}}
            made[f"report_{name}"] = {
                "class_type": "KitchenReport",
                "inputs": {"model": [name, 0], "after": ["sampler", 0]},
            }
        made["sampler"]["inputs"]["model"] = ["one", 0]
        outputs = server.run(made)["outputs"]
        assert "SD15 model" in outputs["report_one"]["text"][0]
        assert "Nothing has run yet" in outputs["report_two"]["text"][0]


def test_without_a_fallback_the_prompt_fails_with_all_reasons(small_server: MakeServer) -> None:
    server = small_server("no_fallback")
    configure(server, "backend:\n  fallback: none\n  enabled: [cuda]\n")
    with server:
        with pytest.raises(PromptError, match=r"(?s)openvino was asked for.*backend.enabled.*not tensorrt"):
            server.run(ours(61))
        # and with an engine that can be built it waits for it instead of failing
        configure(server, "backend:\n  fallback: none\n")
        pictures(server, ours(62))
        assert Calls.of(server).engine >= 2


def test_sd3_has_no_executor_and_runs_on_an_engine(small_server: MakeServer) -> None:
    """A class whose forward runs no DIFFUSION_MODEL wrappers. Latents are compared through the VAE."""
    server = small_server("sd3")
    configure(server, "build: blocking\n")

    def workflow(loader: Loader) -> Workflow:
        made = painted(loader, 63, SD3, 4096, 2048)
        made["latent"]["class_type"] = "EmptySD3LatentImage"
        return made

    with server:
        expected = pictures(server, workflow(STOCK))[0]
        got = pictures(server, workflow(OURS))[0]
        assert Calls.of(server).engine >= 3, server.report()
        assert compare(expected, got).psnr_db >= THRESHOLD_DB
