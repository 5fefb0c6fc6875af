"""The reference itself: ComfyUI's own loader on the tiny checkpoints gives pictures that comparing makes sense of."""

from __future__ import annotations

import io
import time
from pathlib import Path

import numpy as np
import pytest
from kitchen_accel.tools.comfy_server import ComfyServer, PromptError, ServerError
from kitchen_accel.tools.images import IDENTICAL_DB, compare, pixels, side_by_side
from kitchen_accel.tools.workflows import Sampling, img2img, txt2img
from PIL import Image

SD15 = "tiny_sd15.ckpt"
SDXL = "tiny_sdxl.ckpt"


def paint(server: ComfyServer, ckpt: str, seed: int = 1, prompt: str = "a red kitchen", batch: int = 1) -> list[bytes]:
    """Pictures of a run in which the sampler really ran."""
    history = server.run(txt2img(ckpt, batch=batch, prompt=prompt, sampling=Sampling(seed=seed)))
    assert "sampler" not in server.cached_nodes(history)
    return server.images(history)


@pytest.mark.parametrize("ckpt", [SD15, SDXL])
def test_a_picture_depends_on_seed_and_prompt_and_on_nothing_else(server: ComfyServer, ckpt: str) -> None:
    (first,) = paint(server, ckpt, seed=1)
    (other_seed,) = paint(server, ckpt, seed=2)
    (again,) = paint(server, ckpt, seed=1)
    (other_prompt,) = paint(server, ckpt, seed=1, prompt="a green garden with a very old apple tree")
    assert np.array_equal(pixels(first), pixels(again))
    assert not np.array_equal(pixels(first), pixels(other_seed))
    assert not np.array_equal(pixels(first), pixels(other_prompt))


@pytest.mark.parametrize("ckpt", [SD15, SDXL])
def test_pictures_use_the_range_without_being_clipped(server: ComfyServer, ckpt: str) -> None:
    for png in paint(server, ckpt, seed=3, batch=2):
        picture = pixels(png)
        assert picture.shape == (64, 64, 3)
        assert 20 < picture.std() < 70
        assert ((picture == 0) | (picture == 255)).mean() < 0.1


def test_the_rows_of_a_batch_differ(server: ComfyServer) -> None:
    first, second = paint(server, SD15, seed=4, batch=2)
    assert compare(first, second).psnr_db < 30


def test_image_to_image_starts_from_the_picture(server: ComfyServer) -> None:
    name = server.add_input("start.png", paint(server, SD15, seed=5)[0])
    other = server.add_input("other.png", paint(server, SD15, seed=6)[0])
    (one,) = server.images(server.run(img2img(SD15, name)))
    (two,) = server.images(server.run(img2img(SD15, other)))
    assert pixels(one).shape == (64, 64, 3)
    assert not np.array_equal(pixels(one), pixels(two))


def test_a_size_that_is_no_power_of_two(server: ComfyServer) -> None:
    (png,) = server.images(server.run(txt2img(SD15, width=104, height=72)))
    assert pixels(png).shape == (72, 104, 3)


def test_steps_are_timed_from_the_sampler_alone(server: ComfyServer) -> None:
    history = server.run(txt2img(SD15, sampling=Sampling(seed=7, steps=4)))
    times = server.step_seconds(history)
    assert len(times) == 3
    assert all(seconds > 0 for seconds in times)


def test_a_refused_workflow_names_the_node_and_its_fault(server: ComfyServer) -> None:
    workflow = txt2img(SD15)
    workflow["sampler"]["inputs"]["steps"] = "many"
    with pytest.raises(PromptError, match=r"(?s)sampler \(KSampler\).*many"):
        server.run(workflow)


def test_a_failing_node_names_itself(server: ComfyServer) -> None:
    server.add_input("broken.png", b"no picture at all")
    with pytest.raises(PromptError, match="image"):
        server.run(img2img(SD15, "broken.png"))


def test_an_interrupted_prompt_says_so_and_the_next_one_runs(server: ComfyServer) -> None:
    prompt = server.queue(txt2img(SD15, sampling=Sampling(seed=8, steps=2000)))
    while not server.request("/queue")["queue_running"]:
        time.sleep(0.05)
    server.interrupt()
    with pytest.raises(PromptError) as caught:
        server.wait(prompt)
    assert caught.value.interrupted
    assert paint(server, SD15, seed=9)


def test_memory_is_measured(server: ComfyServer) -> None:
    server.reset_peak()
    paint(server, SD15, seed=10)
    # the network alone is 39 M parameters of 4 bytes
    assert server.peak_rss() > 150_000_000


def test_a_server_that_cannot_start_shows_its_log(comfyui: Path, tmp_path: Path) -> None:
    server = ComfyServer(comfyui, tmp_path, extra_args=["--no-such-option"])
    with pytest.raises(ServerError, match=r"(?s)exit code 2.*--no-such-option"):
        server.start()
    with pytest.raises(ServerError, match="not running"):
        _ = server.pid


def test_similarity_of_known_pictures() -> None:
    def png(level: int) -> bytes:
        out = io.BytesIO()
        Image.new("RGB", (16, 16), (level, level, level)).save(out, format="PNG")
        return out.getvalue()

    same = compare(png(100), png(100))
    assert (same.psnr_db, same.ssim, same.max_levels) == (IDENTICAL_DB, 1.0, 0)
    # one level of 255 everywhere: 20 log10(255)
    off_by_one = compare(png(100), png(101))
    assert off_by_one.psnr_db == pytest.approx(48.13, abs=0.01)
    assert off_by_one.max_levels == 1
    assert pixels(side_by_side(png(100), png(101))).shape == (16, 16 * 3 + 2 * 8, 3)
