"""Fixtures of the contract tests that run on ComfyUI's real classes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kitchen_accel.tests.contract import comfy_env
from kitchen_accel.tests.contract.comfy_env import Rig


@pytest.fixture
def one_thread() -> Iterator[None]:
    """These networks are so small that a second thread only costs time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rig(one_thread: None) -> Rig:
    """A fresh small SD1.5."""
    return Rig(comfy_env.make_sd15())


@pytest.fixture
def sd3(one_thread: None) -> Rig:
    """A fresh small SD3, whose network runs no DIFFUSION_MODEL wrappers."""
    return Rig(comfy_env.make_sd3())
