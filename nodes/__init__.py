"""The node maps ComfyUI reads."""

from .accelerate import KitchenAccelerate
from .load import KitchenCheckpointLoader, KitchenDiffusionModelLoader
from .report import KitchenReport

NODE_CLASS_MAPPINGS: dict[str, type] = {
    "KitchenCheckpointLoader": KitchenCheckpointLoader,
    "KitchenDiffusionModelLoader": KitchenDiffusionModelLoader,
    "KitchenAccelerate": KitchenAccelerate,
    "KitchenReport": KitchenReport,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {
    "KitchenCheckpointLoader": "Load Checkpoint (Kitchen)",
    "KitchenDiffusionModelLoader": "Load Diffusion Model (Kitchen)",
    "KitchenAccelerate": "Accelerate Model (Kitchen)",
    "KitchenReport": "Acceleration Report (Kitchen)",
}
