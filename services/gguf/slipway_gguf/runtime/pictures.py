"""Give llama.cpp a picture: its ``mtmd`` computes the ``mmproj`` file beside the text's, in the process that runs the text.

As in :mod:`slipway_gguf.runtime.llama`, structs carry no version: the library's defaults must lie where the layout says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from slipway.files.json_documents import read_object_or_empty
from slipway.proof.runtime import NotRunnable, Unusable
from slipway.proof.sights import Sight
from slipway_gguf.files import projector_files
from slipway_gguf.runtime.llama import NO_FLASH, Llama, note_error

_P = c_void_p
_TEXT = 0
_MARKER = b"<__media__>"
DEFAULTS = {"n_threads": 4, "flash_attn_type": -1, "image_min_tokens": -1, "batch_max_tokens": 1024}
"""Values by which a library with another layout of the struct is told apart."""
_AS_BUILT_IN, _ANY_SIZE = -1, 1
"""Fewest tokens of a picture: those of the model's kind, below which llama.cpp makes it larger; or any number."""


class ContextParams(Structure):
    """``struct mtmd_context_params``."""

    _fields_ = (
        ("use_gpu", c_bool),
        ("device", c_void_p),
        ("print_timings", c_bool),
        ("n_threads", c_int32),
        ("image_marker", c_char_p),
        ("media_marker", c_char_p),
        ("flash_attn_type", c_int32),
        ("warmup", c_bool),
        ("image_min_tokens", c_int32),
        ("image_max_tokens", c_int32),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("batch_max_tokens", c_int32),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
    )


class InputText(Structure):
    """``struct mtmd_input_text``."""

    _fields_ = (("text", c_char_p), ("length", c_size_t), ("add_special", c_bool), ("parse_special", c_bool))


SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mtmd_context_params_default": (ContextParams, ()),
    "mtmd_init_from_file": (_P, (c_char_p, _P, ContextParams)),
    "mtmd_free": (None, (_P,)),
    "mtmd_bitmap_init": (_P, (c_uint32, c_uint32, c_char_p)),
    "mtmd_bitmap_free": (None, (_P,)),
    "mtmd_input_chunks_init": (_P, ()),
    "mtmd_input_chunks_size": (c_size_t, (_P,)),
    "mtmd_input_chunks_get": (_P, (_P, c_size_t)),
    "mtmd_input_chunks_free": (None, (_P,)),
    "mtmd_input_chunk_get_type": (c_int32, (_P,)),
    "mtmd_input_chunk_get_n_tokens": (c_size_t, (_P,)),
    "mtmd_tokenize": (c_int32, (_P, _P, POINTER(InputText), POINTER(_P), c_size_t)),
    "mtmd_helper_eval_chunk_single": (c_int32, (_P, _P, _P, c_int32, c_int32, c_int32, c_bool, POINTER(c_int32))),
    "mtmd_log_set": (None, (_P, _P)),
    "mtmd_helper_log_set": (None, (_P, _P)),
}
"""Results and arguments of the functions that are called."""


class Eye:
    """The ``mmproj`` file beside a text file.

    Args:
        llama: The library.
        model: The text's model.
        folder: Folder of the two files.
        threads: Threads to compute with.

    Raises:
        NotRunnable: There is no such file, llama.cpp computes it otherwise than the model, or the library has other functions.
        Unusable: The file should be there, or cannot be loaded.
    """

    def __init__(self, llama: Llama, model: int, folder: Path, *, threads: int) -> None:
        self._llama, self._model, self._threads = llama, model, threads
        self._file = find_projector(folder)
        self._library = llama.functions
        try:
            for name, (result, arguments) in SIGNATURES.items():
                function = getattr(self._library, name)
                function.restype, function.argtypes = result, arguments
        except AttributeError as error:
            raise NotRunnable(f"{llama.version} has no functions for pictures ({error})") from error
        self._library.mtmd_log_set(note_error, None)
        self._library.mtmd_helper_log_set(note_error, None)
        self._least = _AS_BUILT_IN
        self._handle: int | None = None
        self._open()

    def close(self) -> None:
        """Free its memory."""
        if self._handle:
            self._library.mtmd_free(self._handle)
            self._handle = None

    @contextmanager
    def pieces(self, sight: Sight) -> Iterator[list[int]]:
        """Yield llama.cpp's pieces of a picture, which :meth:`add` takes; free them at the end of the block.

        Raises:
            NotRunnable: llama.cpp makes another number of tokens of it, or may give its pixels other values.
            Unusable: It cannot be read.
        """
        if not sight.colours_known:
            raise NotRunnable(
                "preprocessor_config.json of the base names no image_mean and image_std, so llama.cpp's pixels may have other values"
            )
        count = self._count(sight)
        if count != sight.features and self._least != _ANY_SIZE:
            self._least = _ANY_SIZE
            self._open()
            count = self._count(sight)
        if count != sight.features:
            raise NotRunnable(f"llama.cpp makes {count} tokens of a picture of which the model makes {sight.features}")
        with self._split(sight) as pieces:
            yield pieces

    def most_tokens(self, pieces: list[int]) -> int:
        """Return the tokens of the largest piece."""
        return max(int(self._library.mtmd_input_chunk_get_n_tokens(each)) for each in pieces)

    def add(self, context: int, piece: int, *, place: int, batch: int) -> int:
        """Compute a piece behind what a context has; return the next place of a token.

        Args:
            context: The text's context.
            piece: The piece.
            place: Place of its first token.
            batch: Most tokens that the context computes at once.

        Raises:
            Unusable: It cannot be computed.
        """
        after = c_int32()
        arguments = (self._handle, context, piece, place, 0, batch, False, byref(after))
        if self._library.mtmd_helper_eval_chunk_single(*arguments):
            raise Unusable(f"llama.cpp could not compute a picture with {self._file.name}: {self._llama.errors()}")
        return after.value

    def _open(self) -> None:
        self.close()
        params = self._library.mtmd_context_params_default()
        wrong = [
            f"{name} is {getattr(params, name)}" for name, value in DEFAULTS.items() if getattr(params, name) != value
        ]
        if wrong:
            raise NotRunnable(f"the structs of {self._llama.version} for pictures are not known: {', '.join(wrong)}")
        params.use_gpu, params.warmup, params.print_timings = False, False, False
        params.n_threads, params.flash_attn_type, params.image_min_tokens = max(1, self._threads), NO_FLASH, self._least
        self._handle = self._library.mtmd_init_from_file(str(self._file).encode(), self._model, params)
        if not self._handle:
            raise Unusable(f"llama.cpp cannot load {self._file.name} beside the text: {self._llama.errors()}")

    def _count(self, sight: Sight) -> int:
        with self._split(sight) as pieces:
            return sum(int(self._library.mtmd_input_chunk_get_n_tokens(each)) for each in pieces)

    @contextmanager
    def _split(self, sight: Sight) -> Iterator[list[int]]:
        """Yield the pieces of a picture without the tokens of text that llama.cpp puts beside them."""
        library, (height, width, _) = self._library, sight.pixels.shape
        bitmap = library.mtmd_bitmap_init(width, height, sight.pixels.tobytes())
        chunks = library.mtmd_input_chunks_init()
        try:
            asked = InputText(_MARKER, len(_MARKER), False, True)
            if library.mtmd_tokenize(self._handle, chunks, byref(asked), byref(_P(bitmap)), 1):
                raise Unusable(f"llama.cpp cannot read a picture with {self._file.name}: {self._llama.errors()}")
            every = [library.mtmd_input_chunks_get(chunks, at) for at in range(library.mtmd_input_chunks_size(chunks))]
            yield [each for each in every if library.mtmd_input_chunk_get_type(each) != _TEXT]
        finally:
            library.mtmd_input_chunks_free(chunks)
            library.mtmd_bitmap_free(bitmap)


def find_projector(folder: Path) -> Path:
    """Return the ``mmproj`` file in an output's folder.

    Raises:
        NotRunnable: The output has none, or llama.cpp computes it otherwise than the model.
        Unusable: ``gguf.json`` names one that is not there.
    """
    images = read_object_or_empty(folder / "gguf.json").get("images")
    images = images if isinstance(images, dict) else {}
    files = projector_files(folder)
    named = Path(str(images.get("file") or "")).name
    if named and folder / named not in files:
        raise Unusable(f"its file for images, {named}, which gguf.json names, is not there")
    if not files:
        raise NotRunnable("the output has no file for images (mmproj), so llama.cpp takes text alone")
    if images.get("differs"):
        raise NotRunnable(f"llama.cpp computes images otherwise than the model: {images['differs']}")
    return folder / named if named else files[0]
