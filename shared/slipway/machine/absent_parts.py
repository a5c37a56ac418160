"""Let transformers build models of which one part is computed by a library that is not installed here: that part is left out.

Gemma 3n's part for images is a class of timm, which needs torchvision. Without them transformers builds nothing of the model, though its text
and its sound need neither. The part's weights are not loaded then; stages copy them from file to file, as ever.
"""

from __future__ import annotations

from typing import Any

REMEDY = "pip install timm torchvision pillow, where this stage runs"


class AbsentPartError(RuntimeError):
    """A part of a model was asked for results, and the library that computes it is not installed; the message names it and the remedy."""


def leave_out_absent_parts() -> None:
    """Make transformers build an empty part for images where timm would compute it, if timm is not installed. Imports transformers."""
    import transformers
    from transformers.utils import is_timm_available

    if is_timm_available():
        return
    config_class = transformers.Gemma3nVisionConfig
    if getattr(transformers.AutoModel._model_mapping.get(config_class, None), "is_absent", False):
        return

    class AbsentPart(transformers.PreTrainedModel):  # type: ignore[misc]
        """The part without its weights."""

        is_absent = True

        def forward(self, *_: Any, **__: Any) -> Any:
            """Refuse to compute.

            Raises:
                AbsentPartError: Always.
            """
            raise AbsentPartError(f"its part for images is computed by timm, which is not installed: {REMEDY}")

    AbsentPart.config_class = config_class
    transformers.AutoModel.register(config_class, AbsentPart, exist_ok=True)
