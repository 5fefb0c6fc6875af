"""HTTP routes of the pack. ComfyUI's server takes routes only while it starts, hence at import."""

from __future__ import annotations

import sys
from typing import Any


def register() -> bool:
    """Add `GET /kitchen_accel/report` to the ComfyUI server that is starting; does nothing outside of one.

    Returns whether the route was added. The runtime itself is made when the route is first asked.
    """
    server = getattr(sys.modules.get("server"), "PromptServer", None)
    instance = getattr(server, "instance", None)
    if instance is None:
        return False
    from aiohttp import web

    async def report(request: Any) -> Any:
        from .runtime import runtime

        return web.json_response(runtime().report(request.query.get("model")))

    instance.routes.get("/kitchen_accel/report")(report)
    return True
