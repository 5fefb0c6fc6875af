"""Interrupts and progress texts, as ComfyUI offers them. Never raises but for the interrupt itself."""

from __future__ import annotations

from contextlib import suppress


def poll() -> None:
    """Raises ComfyUI's InterruptProcessingException when the user interrupted the prompt."""
    import comfy.model_management as mm

    mm.throw_exception_if_processing_interrupted()


def interrupts() -> tuple[type[BaseException], ...]:
    """What `poll` raises."""
    import comfy.model_management as mm

    return (mm.InterruptProcessingException,)


def show(text: str) -> None:
    """Show a line on the node that is being executed; does nothing where there is no such node or no server."""
    # a text nobody can see is not worth an error
    with suppress(Exception):
        from comfy_execution.utils import get_executing_context
        from server import PromptServer

        context = get_executing_context()
        if context is not None:
            PromptServer.instance.send_progress_text(text, context.node_id)
