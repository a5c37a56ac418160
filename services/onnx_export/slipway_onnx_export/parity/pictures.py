"""Compare the graphs of a model that takes images: features of pictures, embeddings, and logits of prompts with pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from slipway.machine.onnx_runtime import Opened
from slipway.model.graphs.pictures import EMBEDDING, TYPES, VISION_ENCODER, counted_positions, three_positions
from slipway.proof.pictures import Picture, make_picture
from slipway_onnx_export.forms.pictures.kinds import PictureKind, kind_of
from slipway_onnx_export.names import (
    DEEPSTACK,
    EMBEDS,
    IDS,
    IMAGE_FEATURES,
    LOGITS,
    MASK,
    POSITIONS,
)
from slipway_onnx_export.parity.rows import Array, Conversation, Session, past_of
from slipway_onnx_export.parity.session import OrtSession
from slipway_onnx_export.source import ModelSource

_SIZES = ((4, 6), (7, 5))
"""Tokens down and across of the pictures, where their size is free. The second is not that of the trace."""
_BEFORE, _AFTER = 3, 4
"""Tokens of text before and after a picture."""
_DECODER = "model"


class PartsSession:
    """Embedding and decoder as one session; see :class:`slipway_onnx_export.parity.rows.Session`.

    It takes tokens, with features of pictures or without.
    """

    def __init__(self, embedding: OrtSession, decoder: OrtSession) -> None:
        self._embedding, self._decoder = embedding, decoder
        self.opened: Opened = decoder.opened

    def embed(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Return the results of the embedding; features that are not given are none."""
        given = {name: feed.get(name, np.zeros((0, shape[1]), np.float32)) for name, shape in self._features().items()}
        return self._embedding.run({IDS: feed[IDS], **given})

    def run(self, feed: dict[str, Array]) -> dict[str, Array]:
        """Run both graphs; inputs that they do not have are left out."""
        given = {**feed, **self.embed(feed)}
        for name in TYPES:
            given.setdefault(name, np.zeros_like(feed[MASK]))
        if len(self._decoder.shapes[POSITIONS]) > given[POSITIONS].ndim:
            given[POSITIONS] = np.repeat(given[POSITIONS][None], 3, axis=0)
        return self._decoder.run(given)

    def empty_past(self, *, batch: int) -> dict[str, Array]:
        """Return an empty cache by input name."""
        return self._decoder.empty_past(batch=batch)

    def _features(self) -> dict[str, Sequence[Any]]:
        return {name: shape for name, shape in self._embedding.shapes.items() if name != IDS}


class _EncoderSession:
    """The encoder of pictures; see :class:`slipway_onnx_export.parity.rows.Session`. Its first axes are no rows of text."""

    def __init__(self, session: OrtSession) -> None:
        self._session = session

    def run(self, feed: dict[str, Array]) -> dict[str, Array]:
        """Run the graph."""
        return self._session.compute(feed)

    def empty_past(self, *, batch: int) -> dict[str, Array]:  # noqa: ARG002 - as all sessions have it
        """Return an empty cache, which an encoder has not."""
        return {}


def sessions_of_parts(sessions: Mapping[str, OrtSession]) -> dict[str, Session]:
    """Return sessions by name, of which that of the decoder takes tokens; ``sessions`` has one for each graph."""
    encoder, embedding = (Path(name).stem for name in (VISION_ENCODER, EMBEDDING))
    return {
        encoder: _EncoderSession(sessions[encoder]),
        _DECODER: PartsSession(sessions[embedding], sessions[_DECODER]),
    }


def has_pictures(folder: Path) -> bool:
    """Return whether a folder has the graphs of a model that takes images."""
    return (folder / VISION_ENCODER).is_file()


@dataclass(slots=True)
class _Prompt:
    """Rows of text with a picture in each. How many tokens a picture has, only the model says.

    Attributes:
        pictures: The picture of each row.
        grids: Tokens down and across of each picture, where its size is free.
        pads: Left padding of each row, in tokens.
        vocabulary: Tokens of the model.
        marks: Tokens that stand for pictures or sound.
        ids: Tokens, (rows, tokens), once the model is known.
        mask: 1 for a token and 0 for padding, (rows, tokens).
    """

    pictures: tuple[Picture, ...]
    grids: tuple[tuple[int, int], ...]
    pads: tuple[int, ...]
    vocabulary: int
    marks: tuple[int, ...]
    ids: Array = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    mask: Array = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    def fill(self, model: Any) -> None:
        """Write the tokens."""
        if self.ids.size:
            return
        tokens = len(_features_of(model, self.arguments())) // len(self.pictures)
        width = max(self.pads) + _BEFORE + tokens + _AFTER
        self.ids = self.text((len(self.pads), width), seed=0)
        self.ids[:, width - _AFTER - tokens : width - _AFTER] = self.pictures[0].token
        self.mask = (np.arange(width)[None] >= np.array(self.pads)[:, None]).astype(np.int64)

    def text(self, shape: tuple[int, ...], *, seed: int) -> Array:
        """Return tokens of text; none stands for a picture or sound."""
        known = np.setdiff1d(np.arange(self.vocabulary), self.marks)
        ids: Array = np.random.default_rng(seed).choice(known, size=shape).astype(np.int64)
        return ids

    def arguments(self) -> dict[str, torch.Tensor]:
        """Return the pictures as arguments of transformers' class."""
        names = self.pictures[0].arguments
        return {
            name: torch.from_numpy(np.concatenate([each.arguments[name] for each in self.pictures])) for name in names
        }

    def types(self) -> Array:
        """Return 1 for the tokens of pictures."""
        kinds: Array = (self.ids == self.pictures[0].token).astype(np.int64)
        return kinds


def _features_of(model: Any, arguments: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the features of pictures by transformers, (tokens, width), with those for single layers beside each other."""
    made = model.model.get_image_features(**arguments, return_dict=True)
    single = getattr(made, "deepstack_features", None) or ()
    return torch.cat([_joined(each) for each in (made.pooler_output, *single)], dim=-1)


def _joined(features: Any) -> torch.Tensor:
    """Return features as one tensor, (tokens, width); some classes return one for each picture."""
    whole = features if isinstance(features, torch.Tensor) else torch.cat([each.flatten(0, -2) for each in features])
    return whole.flatten(0, -2)


def _encode(kind: PictureKind, pictures: Sequence[Picture], sessions: Mapping[str, Session]) -> dict[str, Array]:
    """Return the features of pictures by the graph: of all at once where it takes several, otherwise one after another."""
    calls: list[dict[str, Array]]
    if kind.joined is None:
        calls = [{name: np.asarray(each.arguments[name]) for name in kind.inputs} for each in pictures]
    else:
        names = kind.inputs
        calls = [{n: np.concatenate([each.arguments[n] for each in pictures], axis=kind.joined) for n in names}]
    made = [sessions[Path(VISION_ENCODER).stem].run(call) for call in calls]
    return {name: np.concatenate([each[name] for each in made]) for name in made[0]}


@dataclass(frozen=True)
class _Features:
    """Features of pictures; see :class:`slipway_onnx_export.parity.rows.Conversation`."""

    name: str
    pictures: tuple[Picture, ...]
    kind: PictureKind
    calls: int = 1

    def prepare(self, model: Any) -> None:
        pass

    def run_reference(self, model: Any) -> Iterator[Array]:
        made = []
        for picture in self.pictures:
            arguments = {name: torch.from_numpy(np.array(value)) for name, value in picture.arguments.items()}
            made.append(_features_of(model, arguments))
        yield torch.cat(made).numpy()

    def run_exported(self, sessions: Mapping[str, Session]) -> Iterator[Array]:
        made = _encode(self.kind, self.pictures, sessions)
        single = [made[DEEPSTACK.format(number)] for number in range(len(made) - 1)]
        yield np.concatenate([made[IMAGE_FEATURES], *single], axis=-1)


@dataclass(frozen=True)
class _Embeddings:
    """Embeddings of a prompt; see :class:`slipway_onnx_export.parity.rows.Conversation`."""

    name: str
    prompt: _Prompt
    kind: PictureKind
    calls: int = 1

    def prepare(self, model: Any) -> None:
        self.prompt.fill(model)

    def run_reference(self, model: Any) -> Iterator[Array]:
        seen: list[torch.Tensor] = []

        def keep(_module: Any, _args: Any, named: dict[str, Any]) -> None:
            seen.append(named[EMBEDS])

        text = getattr(model.model, "language_model", None) or model.model.text_model
        hook = text.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            _call(model, self.prompt, transformers.DynamicCache(config=model.config))
        finally:
            hook.remove()
        yield seen[0].numpy()[self.prompt.mask.astype(bool)]

    def run_exported(self, sessions: Mapping[str, Session]) -> Iterator[Array]:
        session = sessions[_DECODER]
        assert isinstance(session, PartsSession)
        features = _encode(self.kind, self.prompt.pictures, sessions)
        yield session.embed({IDS: self.prompt.ids, **features})[EMBEDS][self.prompt.mask.astype(bool)]


def _call(model: Any, prompt: _Prompt, cache: Any) -> Any:
    """Run transformers' model on a prompt; where positions are three numbers, it finds them."""
    types, kind = prompt.pictures[0].types, kind_of(model.config)
    mask = torch.from_numpy(prompt.mask.copy())
    given = {} if kind.thrice else {POSITIONS: torch.from_numpy(counted_positions(prompt.mask, new=mask.shape[1]))}
    return model(
        input_ids=torch.from_numpy(prompt.ids.copy()),
        attention_mask=mask,
        **given,
        **prompt.arguments(),
        **({types: torch.from_numpy(prompt.types())} if types else {}),
        past_key_values=cache,
        use_cache=True,
    )


@dataclass(frozen=True)
class _Conversation:
    """A prompt with pictures, then tokens after it; see :class:`slipway_onnx_export.parity.rows.Conversation`."""

    name: str
    prompt: _Prompt
    kind: PictureKind
    later: tuple[int, ...] = (1, 1, 3)

    @property
    def calls(self) -> int:
        return 1 + len(self.later)

    def prepare(self, model: Any) -> None:
        self.prompt.fill(model)

    def run_reference(self, model: Any) -> Iterator[Array]:
        cache = transformers.DynamicCache(config=model.config)
        yield _call(model, self.prompt, cache).logits.numpy()[self.prompt.mask.astype(bool)]
        for ids, mask in self._further():
            positions = torch.from_numpy(counted_positions(mask, new=ids.shape[1]))
            if self.kind.thrice:  # the class keeps by how much its pictures have moved each row's positions
                positions = (positions + model.model.rope_deltas)[None].expand(3, -1, -1)
            made = model(
                input_ids=torch.from_numpy(ids.copy()),
                attention_mask=torch.from_numpy(mask.copy()),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            yield made.logits.numpy().reshape(-1, made.logits.shape[-1])

    def run_exported(self, sessions: Mapping[str, Session]) -> Iterator[Array]:
        session, prompt = sessions[_DECODER], self.prompt
        types = dict.fromkeys(TYPES, prompt.types())
        positions = counted_positions(prompt.mask, new=prompt.ids.shape[1])
        if self.kind.thrice:
            token = prompt.pictures[0].token
            positions = three_positions(prompt.ids, prompt.mask, token=token, grids=prompt.grids)
        results = session.run(
            {
                IDS: prompt.ids,
                MASK: prompt.mask,
                POSITIONS: positions,
                **types,
                **_encode(self.kind, prompt.pictures, sessions),
                **session.empty_past(batch=len(prompt.ids)),
            }
        )
        yield results[LOGITS][prompt.mask.astype(bool)]
        beyond = _after(positions, prompt.mask)  # (rows, 1)
        for ids, mask in self._further():
            new = ids.shape[1]
            types = {name: np.pad(each, ((0, 0), (0, new))) for name, each in types.items()}
            places = beyond + np.arange(new)
            beyond = beyond + new
            results = session.run({IDS: ids, MASK: mask, POSITIONS: places, **types, **past_of(results)})
            yield results[LOGITS].reshape(-1, results[LOGITS].shape[-1])

    def _further(self) -> Iterator[tuple[Array, Array]]:
        """Yield the tokens of each later call, and the mask of all tokens up to them."""
        mask = self.prompt.mask
        for number, new in enumerate(self.later, start=1):
            ids = self.prompt.text((len(mask), new), seed=number)
            mask = np.concatenate([mask, np.ones_like(ids)], axis=1)
            yield ids, mask


def _after(positions: Array, mask: Array) -> Array:
    """Return the position after all those of a row, (rows, 1). positions: (rows, tokens) or (3, rows, tokens)."""
    largest = positions if positions.ndim == 2 else positions.max(axis=0)
    after: Array = np.where(mask.astype(bool), largest, -1).max(axis=1, keepdims=True) + 1
    return after


def pictures_of(source: ModelSource) -> tuple[list[Conversation], list[Conversation], list[Conversation]]:
    """Return what is compared of features, of embeddings, and of logits.

    The type of the model is one of those whose pictures are known.
    """
    kind = kind_of(source.config)
    small = [_picture(source.config, seed=seed, tokens=_SIZES[0]) for seed in (1, 2)]
    large = _picture(source.config, seed=3, tokens=_SIZES[1])
    one, other = _prompt(source, small[:1], pads=(0,)), _prompt(source, [large], pads=(0,))
    rows = _prompt(source, small, pads=(2, 0))
    features = [_Features("features of a picture", (small[0][0],), kind)]
    if kind.joined is None:
        features.append(_Features("features of a picture of another size", (large[0],), kind))
    else:
        features.append(_Features("features of two pictures at once", (large[0], small[0][0]), kind))
    return (
        list(features),
        [_Embeddings("embeddings of two rows with pictures", rows, kind)],
        [
            _Conversation("a picture", one, kind),
            _Conversation("another picture, of another size", other, kind),
            _Conversation("batch 2, left padding, a picture in each row", rows, kind),
        ],
    )


def _picture(config: Any, *, seed: int, tokens: tuple[int, int]) -> tuple[Picture, tuple[int, int]]:
    """Return a picture, and its tokens down and across where its size is free."""
    picture = make_picture(config, seed=seed, tokens=tokens)
    assert picture is not None
    if "image_grid_thw" in picture.arguments:
        _, rows, columns = (int(each) for each in picture.arguments["image_grid_thw"][0])
        merge = int(config.vision_config.spatial_merge_size)
        tokens = rows // merge, columns // merge
    return picture, tokens


def _prompt(
    source: ModelSource, pictures: Sequence[tuple[Picture, tuple[int, int]]], *, pads: tuple[int, ...]
) -> _Prompt:
    names = ("image_token_id", "video_token_id", "audio_token_id")
    marks = tuple(token for name in names if isinstance(token := getattr(source.config, name, None), int))
    return _Prompt(
        tuple(picture for picture, _ in pictures),
        tuple(grid for _, grid in pictures),
        pads,
        int(source.text_config.vocab_size),
        marks,
    )
