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


def node() -> str | None:
    """Id of the node that is being executed on this thread, or None."""
    with suppress(Exception):
        from comfy_execution.utils import get_executing_context

        context = get_executing_context()
        return None if context is None else str(context.node_id)
    return None


def show(text: str, node_id: str | None) -> None:
    """Show a line on a node; does nothing without a node, or where no server is there to show it."""
    # a text nobody can see is not worth an error
    with suppress(Exception):
        from server import PromptServer

        if node_id is not None:
            PromptServer.instance.send_progress_text(text, node_id)
