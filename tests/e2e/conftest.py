"""What the end-to-end tests share: a real ComfyUI, tiny checkpoints, servers with the pack in custom_nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kitchen_accel.tools import tiny_checkpoints
from kitchen_accel.tools.comfy_server import ComfyServer, end_on_sigterm

ROOT = Path(__file__).resolve().parents[2]

SD15 = "tiny_sd15.ckpt"
SDXL = "tiny_sdxl.ckpt"

MakeServer = Callable[..., ComfyServer]


def pytest_configure() -> None:
    """SIGTERM ends the session like Ctrl-C, so that no server outlives it."""
    end_on_sigterm()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts a server."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def comfyui() -> Path:
    """The ComfyUI under test. Skips where there is none."""
    value = os.environ.get("COMFYUI_PATH")
    if not value:
        pytest.skip("COMFYUI_PATH names no ComfyUI to run against; `python dev.py test` sets it")
    return Path(value)


@pytest.fixture(scope="session")
def checkpoints(comfyui: Path) -> Path:
    """Folder with the tiny checkpoints `SD15` and `SDXL`, kept between test runs."""
    return tiny_checkpoints.ensure(comfyui, ROOT / ".demo" / "models", [SD15, SDXL])


@pytest.fixture(scope="session")
def make_server(
    comfyui: Path, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., ComfyServer]]:
    """`make_server(name, **options)`: a server that is not started yet, with both checkpoints and the pack.

    name: of its base folder, below the test session's temporary folder; the same name twice gives the same folder.
    options: as for ComfyServer; `pack=None` leaves the pack out. Every server is stopped when the session ends.
    """
    bases = tmp_path_factory.mktemp("comfy")
    with ExitStack() as stack:

        def make(name: str, **options: object) -> ComfyServer:
            arguments: dict[str, object] = {"pack": ROOT, **options}
            server = ComfyServer(comfyui, bases / name, **arguments)  # type: ignore[arg-type]
            stack.callback(server.stop)
            for checkpoint in (SD15, SDXL):
                server.add_model(checkpoints / checkpoint)
            return server

        yield make


@pytest.fixture(scope="session")
def server(make_server: MakeServer) -> ComfyServer:
    """One running server for all tests that do not care about its state."""
    shared = make_server("shared")
    shared.start()
    return shared
