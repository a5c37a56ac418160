"""Make the base model's folder of a GGUF file: weights in bfloat16 and the tokenizer, as a model hub has them."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path


def write_base(gguf: Path, folder: Path) -> None:
    """Write the Llama in a GGUF file as a folder of safetensors.

    Raises:
        OSError: The file cannot be read, or the folder not written.
    """
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    # transformers prints a bar of its own while it dequantizes.
    with contextlib.redirect_stderr(io.StringIO()):
        read = LlamaForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # with it, transformers refuses to save
    plain = LlamaForCausalLM(config).to(torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
