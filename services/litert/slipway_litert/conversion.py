"""Convert modules to a program of fixed shapes, and round its weights."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import litert_torch
import torch

Sample = Mapping[str, torch.Tensor]


def convert(module: torch.nn.Module, samples: Mapping[str, Sample], target: Path) -> None:
    """Write a program with a signature for each sample; they share the weights."""
    litert_torch.config.show_progress = False
    litert_torch.config.silence_torch_logs = False  # it would change levels and handlers of this process for good
    converter = litert_torch.Converter()
    for name, sample in samples.items():
        converter.add_signature(name, module.eval(), sample_kwargs=dict(sample))
    with torch.no_grad(), contextlib.redirect_stdout(sys.stderr):
        converter.convert().export(str(target))


def round_weights(source: Path, target: Path) -> None:
    """Write a program with weights of 8 bits, a scale for each row, whose products round their inputs while it runs."""
    from ai_edge_quantizer import quantizer, recipe

    with contextlib.redirect_stdout(sys.stderr):
        rounding: Any = quantizer.Quantizer(str(source), recipe.dynamic_wi8_afp32())
        rounding.quantize().export_model(str(target))
