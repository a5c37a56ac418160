"""A GGUF file that makes vectors or a score of texts, as a model of the validation: several texts at once, each a sequence of its own.

Axes: B = texts, S = tokens of the longest, H = width of a vector.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from slipway.model.configuration import ModelConfig
from slipway.model.families import FEATURE_EXTRACTION, SEQUENCE_CLASSIFIER, Family
from slipway.model.sentences import SENTENCE_EMBEDDING, UnknownPoolingError, read_pooling
from slipway.proof.numerics import Logits
from slipway.proof.precision import stored_dtype
from slipway.proof.runtime import Bounds, Step, Unusable, read_config
from slipway.proof.text_models import TextReader
from slipway_gguf.runtime.llama import AUTO_FLASH, F16, F32, NO_FLASH, Batch, Llama
from slipway_gguf.runtime.model import GGUFModel, only_file

FAMILIES = (FEATURE_EXTRACTION, SEQUENCE_CLASSIFIER)
"""Families of models without a language head."""
_TOKENS, _OWN, _RANK = 0, -1, 4
"""llama.cpp's numbers of poolings: none, that of the file, and the score of a text."""
_MOST_TEXTS = 8
"""Texts in one call."""
_FIRST_SIZE = 512
_P = c_void_p
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_pooling_type": (c_int32, (_P,)),
    "llama_get_embeddings": (POINTER(c_float), (_P,)),
    "llama_get_embeddings_seq": (POINTER(c_float), (_P, c_int32)),
    "llama_model_n_embd": (c_int32, (_P,)),
    "llama_model_n_embd_out": (c_int32, (_P,)),
    "llama_model_n_cls_out": (c_uint32, (_P,)),
}
_TENSOR_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_get_name": (c_char_p, (_P,)),
    "ggml_nelements": (c_int64, (_P,)),
    "ggml_backend_tensor_get": (None, (_P, _P, c_size_t, c_size_t)),
}
_WATCH = ctypes.CFUNCTYPE(c_bool, _P, c_bool, _P)
_LAST_STATES = (b"result_norm", b"result_embd_pooled")
"""Names of the vectors of tokens in graphs. Without a pooling both are the same tensor, and results of the layers behind have the second name too."""
_TWO = 2
_SMALLEST = np.finfo(np.float32).tiny


class Watcher:
    """Takes the vectors of tokens from the graph while llama.cpp computes it."""

    def __init__(self, llama: Llama) -> None:
        self._functions, self._values = llama.functions, np.empty(0, np.float32)
        for name, (result, arguments) in _TENSOR_FUNCTIONS.items():
            function = getattr(self._functions, name)
            function.restype, function.argtypes = result, arguments
        self._callback = _WATCH(self._watch)
        self.address = ctypes.cast(self._callback, c_void_p).value

    def _watch(self, tensor: int, asks: bool, _: Any) -> bool:
        """Return whether the tensor is the one to take; take it when it is computed. Return True then too, so that llama.cpp goes on."""
        if self._functions.ggml_get_name(tensor) not in _LAST_STATES or self._values.size:
            return not asks
        if not asks:
            values = np.empty(self._functions.ggml_nelements(tensor), np.float32)
            self._functions.ggml_backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
            self._values = values
        return True

    def begin(self) -> None:
        """Take the vectors of the next call."""
        self._values = np.empty(0, np.float32)

    def taken(self, tokens: int, width: int) -> Logits:
        """Return the vectors of the tokens of the last call. (tokens, width)."""
        if self._values.size != tokens * width:
            raise Unusable(f"llama.cpp computed {self._values.size} values for {tokens} tokens of {width}")
        return self._values.reshape(tokens, width)


class GGUFReader(TextReader, GGUFModel):
    """A GGUF file of an embedder or a reranker in llama.cpp.

    The pooling is the file's. Lengths are llama-server's: 1, unless the model's files say that a vector keeps its own.

    Args:
        llama: llama.cpp's functions.
        file: The file.
        threads: Number of threads.
        stored: Type of the stored weights.
        config: The model's configuration.
        family: Its family.
    """

    has_cache = False

    def __init__(
        self, llama: Llama, file: Path, *, threads: int, stored: str, config: ModelConfig, family: Family
    ) -> None:
        GGUFModel.__init__(self, llama, file, threads=threads, stored=stored)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(llama.functions, name)
            function.restype, function.argtypes = result, arguments
        self.bounds = Bounds(batch=_MOST_TEXTS, sequence=self.bounds.sequence)
        self.architecture = config.class_name
        self._pooling = _TOKENS
        try:
            pooling = read_pooling(file.parent) if family is FEATURE_EXTRACTION else None
        except UnknownPoolingError as error:
            raise Unusable(f"its files do not say how a text becomes one vector: {error}") from error
        self._hidden = int(llama.functions.llama_model_n_embd(self._model))
        # With layers behind the pooling llama.cpp gives no vectors of tokens that did not go through them.
        self._watcher = Watcher(llama) if pooling is not None and pooling.layers else None
        self._normalizes = pooling is not None and pooling.normalized
        embeds = family is FEATURE_EXTRACTION and pooling is not None
        self.read_as(family, config, (*family.outputs, *((SENTENCE_EMBEDDING,) if embeds else ())))

    def results(self, step: Step, names: tuple[str, ...]) -> list[Logits]:
        """As :meth:`slipway.proof.text_models.TextReader.results`."""
        return [self._result(step, name) for name in names]

    def _result(self, step: Step, name: str) -> Logits:
        if name == SENTENCE_EMBEDDING:
            vectors = self._vectors(step, _OWN)
            lengths = np.linalg.norm(vectors, axis=-1, keepdims=True) if self._normalizes else 1.0
            result: Logits = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
            return result
        if name == "logits":
            return self._scores(self._vectors(step, _RANK))
        mask = step.attention_mask.astype(bool)
        hidden = np.zeros((*mask.shape, self._hidden), dtype=np.float32)
        self._run(step, _TOKENS)
        if self._watcher is not None:
            hidden[mask] = self._watcher.taken(int(mask.sum()), self._hidden)
            return hidden
        values = self._llama.functions.llama_get_embeddings(self._context)
        if not values:
            raise Unusable(f"llama.cpp gives no vectors of tokens: {self._llama.errors()}")
        hidden[mask] = np.ctypeslib.as_array(values, shape=(int(mask.sum()), self._hidden))
        return hidden

    @staticmethod
    def _scores(given: Logits) -> Logits:
        """Return scores from what llama.cpp gives. (B, 1) → (B, 1), or (B, 2) → (B, 1): of two shares, the logit of the first."""
        if given.shape[1] != _TWO:
            return given
        shares = np.maximum(given, _SMALLEST)
        result: Logits = np.log(shares[:, :1]) - np.log(shares[:, 1:])
        return result

    def _vectors(self, step: Step, pooling: int) -> Logits:
        """Return the vector of each text, or what makes its score. (B, H)."""
        self._run(step, pooling)
        functions = self._llama.functions
        width = int(functions.llama_model_n_embd_out(self._model))
        if functions.llama_pooling_type(self._context) == _RANK:
            width = int(functions.llama_model_n_cls_out(self._model))
        rows = []
        for row in range(len(step.input_ids)):
            values = functions.llama_get_embeddings_seq(self._context, row)
            if not values:
                raise Unusable(f"llama.cpp makes no vector of a text: {self._llama.errors()}")
            rows.append(np.ctypeslib.as_array(values, shape=(width,)).copy())
        return np.stack(rows)

    def _run(self, step: Step, pooling: int) -> None:
        """Compute the tokens of several texts."""
        mask = step.attention_mask.astype(bool)
        texts = [row[real] for row, real in zip(step.input_ids, mask, strict=True)]
        if len(texts) > _MOST_TEXTS or not all(map(len, texts)):
            raise Unusable(f"it takes at most {_MOST_TEXTS} texts at once, each of at least one token")
        self._make_room(sum(map(len, texts)), pooling)
        functions, count = self._llama.functions, int(mask.sum())
        memory = functions.llama_get_memory(self._context)
        if memory:
            functions.llama_memory_clear(memory, True)
        rows = [ctypes.c_int32(row) for row, text in enumerate(texts) for _ in text]
        batch = Batch(
            n_tokens=count,
            token=(c_int32 * count)(*[int(token) for text in texts for token in text]),
            pos=(c_int32 * count)(*[place for text in texts for place in range(len(text))]),
            n_seq_id=(c_int32 * count)(*[1] * count),
            seq_id=(POINTER(c_int32) * count)(*map(ctypes.pointer, rows)),
            logits=(c_int8 * count)(*[1] * count),
        )
        if self._watcher is not None:
            self._watcher.begin()
        failed = functions.llama_decode(self._context, batch)
        if failed:
            raise Unusable(f"llama.cpp could not compute {count} tokens ({failed}): {self._llama.errors()}")

    def _make_room(self, count: int, pooling: int) -> None:
        """Open a context for so many tokens with this pooling, unless there is one."""
        if self._context and pooling == self._pooling and count <= self._size:
            return
        size = max(_FIRST_SIZE, self._size)
        while size < count:
            size *= 2
        self._pooling = pooling
        self._open(size)

    def _open(self, size: int, *, call: int = 0) -> None:
        """As :meth:`GGUFModel._open`: a context that computes all its tokens in one call, because each sees those behind it too."""
        functions = self._llama.functions
        if self._context:
            functions.llama_free(self._context)
            self._context = None  # so that it is not freed twice if the next steps fail
        params = functions.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self._size = max(_FIRST_SIZE, size, call)
        params.n_seq_max, params.kv_unified = _MOST_TEXTS, True
        params.n_threads = params.n_threads_batch = max(1, self._threads)
        params.flash_attn_type = NO_FLASH if self._comparing else AUTO_FLASH
        params.type_k = params.type_v = F32 if self._comparing else F16
        params.pooling_type, params.embeddings = self._pooling, True
        params.swa_full = params.no_perf = True
        if self._watcher is not None:
            params.cb_eval = self._watcher.address
        self._llama.listen()
        self._context = functions.llama_init_from_model(self._model, params)
        if not self._context:
            raise Unusable(f"llama.cpp cannot open a context of {self._size} tokens: {self._llama.errors()}")


def load(folder: Path, *, threads: int) -> GGUFReader:
    """Load the GGUF file of an embedder or a reranker in a folder.

    Raises:
        NotRunnable: llama.cpp is missing here, or of another version.
        Unusable: The folder has no single GGUF file, or llama.cpp cannot load it.
    """
    config, family = read_config(folder)
    file, stored = only_file(folder), stored_dtype(folder)
    return GGUFReader(Llama(), file, threads=threads, stored=stored, config=config, family=family)
