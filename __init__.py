"""Comfy Kitchen Accelerator: the node maps ComfyUI reads and one HTTP route, and nothing else."""

if __package__:
    from .host.routes import register as _register
    from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

    WEB_DIRECTORY = "./web"
    __all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]

    _register()
