"""Run a GGUF file and its ``mmproj`` file with llama.cpp's ``mtmd``: embeddings of an image, and logits of a prompt with it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipway_gguf.runtime.llama import F32, NO_FLASH, Llama
from slipway_gguf.runtime.pictures import DEFAULTS, SIGNATURES, InputText

_P = c_void_p
_TEXT = 0
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    **SIGNATURES,
    "mtmd_input_chunk_get_tokens_text": (POINTER(c_int32), (_P, POINTER(c_size_t))),
    "mtmd_encode_chunk": (c_int32, (_P, _P)),
    "mtmd_get_output_embd": (POINTER(c_float), (_P,)),
    "llama_model_free": (None, (_P,)),
    "llama_model_n_embd_inp": (c_int32, (_P,)),
    "llama_get_logits_ith": (POINTER(c_float), (_P, c_int32)),
}
_LOG = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
_said: list[str] = []


@_LOG
def _note(_level: int, text: bytes, _: Any) -> None:
    _said.append(text.decode(errors="replace"))


@dataclass(frozen=True)
class Run:
    """What llama.cpp computes of a prompt with one image.

    Attributes:
        pieces: Tokens of text, and embeddings in the place of an image or of a part of it, in order. (tokens, width)
        logits: Logits of the token behind the prompt. (vocabulary,)
    """

    pieces: list[list[int] | np.ndarray]
    logits: np.ndarray

    @property
    def embeddings(self) -> np.ndarray:
        """All embeddings of the image's parts. (tokens, width)"""
        return np.concatenate([each for each in self.pieces if isinstance(each, np.ndarray)])


def run_with_image(text: Path, projector: Path, image: np.ndarray, *, prompt: str = "look <__media__> so") -> Run:
    """Run a prompt with an image. image: (height, width, 3), bytes."""
    llama = Llama()
    library = llama.functions
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    _said.clear()
    library.mtmd_log_set(_note, None)
    library.mtmd_helper_log_set(_note, None)
    with _loaded(llama, text) as (model, context):
        params = library.mtmd_context_params_default()
        assert {key: getattr(params, key) for key in DEFAULTS} == DEFAULTS
        params.use_gpu, params.warmup, params.n_threads, params.flash_attn_type = False, False, 1, NO_FLASH
        eye = library.mtmd_init_from_file(str(projector).encode(), model, params)
        assert eye, "".join(_said)[-2000:]
        bitmap = library.mtmd_bitmap_init(image.shape[1], image.shape[0], image.tobytes())
        chunks = library.mtmd_input_chunks_init()
        try:
            asked = InputText(prompt.encode(), len(prompt.encode()), False, True)
            assert not library.mtmd_tokenize(eye, chunks, byref(asked), byref(_P(bitmap)), 1), "".join(_said)[-2000:]
            return _compute(library, model, context, eye, chunks)
        finally:
            library.mtmd_input_chunks_free(chunks)
            library.mtmd_bitmap_free(bitmap)
            library.mtmd_free(eye)


@contextmanager
def _loaded(llama: Llama, text: Path) -> Iterator[tuple[int, int]]:
    library = llama.functions
    params = library.llama_model_default_params()
    params.n_gpu_layers = 0
    model = library.llama_model_load_from_file(str(text).encode(), params)
    assert model, llama.errors()
    options = library.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 1024
    options.n_threads = options.n_threads_batch = 1
    options.flash_attn_type, options.swa_full = NO_FLASH, True
    options.type_k = options.type_v = F32
    context = library.llama_init_from_model(model, options)
    assert context, llama.errors()
    try:
        yield model, context
    finally:
        library.llama_free(context)
        library.llama_model_free(model)


def _compute(library: Any, model: int, context: int, eye: int, chunks: int) -> Run:
    pieces: list[list[int] | np.ndarray] = []
    size, past = library.mtmd_input_chunks_size(chunks), c_int32()
    for index in range(size):
        chunk = library.mtmd_input_chunks_get(chunks, index)
        if library.mtmd_input_chunk_get_type(chunk) == _TEXT:
            count = c_size_t()
            listed = library.mtmd_input_chunk_get_tokens_text(chunk, byref(count))
            pieces.append(listed[: count.value])
        else:
            assert not library.mtmd_encode_chunk(eye, chunk), "".join(_said)[-2000:]
            shape = (library.mtmd_input_chunk_get_n_tokens(chunk), library.llama_model_n_embd_inp(model))
            pieces.append(np.ctypeslib.as_array(library.mtmd_get_output_embd(eye), shape=shape).copy())
        options = (past.value, 0, 1024, index == size - 1)
        failed = library.mtmd_helper_eval_chunk_single(eye, context, chunk, *options, byref(past))
        assert not failed, "".join(_said)[-2000:]
    count = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    logits = np.ctypeslib.as_array(library.llama_get_logits_ith(context, -1), shape=(count,)).copy()
    return Run(pieces, logits)
