"""What an entry of the table of architectures says: settings, keys of the metadata, and how tensors change. Light: no numpy.

A view takes an array of numpy and returns a view of it, without a copy. So this module needs no numpy itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from slipway.errors import GGUFExportError
from slipway.model.configuration import ModelConfig
from slipway.model.decoders.decoder import LOCAL, Decoder
from slipway.model.decoders.decoder_class import DecoderClass
from slipway.model.decoders.layers import layer_kinds
from slipway.model.decoders.values import ConfigValues

CONFIG_VALUES = ConfigValues(GGUFExportError)

View = Callable[[Any], Any]


def keep(whole: Any) -> Any:
    """Return a tensor as it is."""
    return whole


def transpose(whole: Any) -> Any:
    """Return a tensor with its axes exchanged."""
    return whole.T


@dataclass(frozen=True, slots=True)
class Numbers:
    """A model's settings, for entries of the table.

    Attributes:
        decoder: Its sizes.
        config: Its ``config.json``.
    """

    decoder: Decoder
    config: ModelConfig

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer, as transformers 5 names it."""
        kinds = layer_kinds(self.config, self.decoder.kind)
        if len(kinds) != self.decoder.layers:
            raise CONFIG_VALUES.invalid("layer_types", kinds, f"a list of the kinds of {self.decoder.layers} layers")
        return kinds

    def whole(self, *keys: str, default: int | None = None) -> int:
        """Return the first of these settings that is there: a whole number from 1."""
        return CONFIG_VALUES.whole(self.decoder.settings, *keys, default=default)

    def count(self, key: str) -> int:
        """Return a whole number from 0; 0 if the setting is left out."""
        return 0 if self.decoder.settings.get(key) in (None, 0) else self.whole(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a setting that is a finite number."""
        return CONFIG_VALUES.number(self.decoder.settings, key, default)

    def optional_number(self, key: str) -> float | None:
        """Return a setting that is a finite number; None if it is left out."""
        return CONFIG_VALUES.optional_number(self.decoder.settings, key)

    def flag(self, key: str) -> bool:
        """Return a setting that is true or false."""
        return CONFIG_VALUES.flag(self.decoder.settings, key)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a setting that is a list of so many numbers."""
        listed = self.decoder.settings.get(key)
        if not isinstance(listed, list) or len(listed) != count:
            raise CONFIG_VALUES.invalid(key, listed, f"a list of {count} numbers")
        return tuple(CONFIG_VALUES.number({key: each}, key) for each in listed)

    def by_kind(self, kind: str, value: int) -> tuple[int, ...]:
        """Return a number for each layer: ``value`` in layers of this kind, otherwise 0."""
        return tuple(value if each == kind else 0 for each in self.kinds)


def kv_heads_by_layer(numbers: Numbers) -> tuple[int, ...]:
    """Return the number of heads of keys and values in each layer; 0 in layers without attention."""
    return numbers.by_kind("full_attention", numbers.decoder.kv_heads)


def local_layers(numbers: Numbers) -> tuple[bool, ...]:
    """Return for each layer whether it has a sliding window."""
    return tuple(each == LOCAL for each in numbers.kinds)


def rope_number(numbers: Numbers, key: str) -> float | None:
    """Return a setting of the rotary embedding; None if it is left out."""
    return CONFIG_VALUES.optional_number(numbers.decoder.rotary.parameters, key)


class Change(Enum):
    """A function that is applied to each value of a tensor, in float64."""

    NONE = "none"
    NEGATED_EXPONENTIAL = "-exp(x)"


@dataclass(frozen=True, slots=True)
class Piece:
    """Values from a tensor of the model; steps are applied in the order of the attributes.

    Attributes:
        form: Gives the tensor the axes of the file's. A tensor with a form takes no pair of factors of an adapter, except a transposed one.
        take: Takes some of the rows.
        rows: Puts the rows into another order; the result may have more axes.
        columns: Puts the columns into another order; the result may have more axes.
        factor: Number to multiply each value by.
    """

    form: View = keep
    take: View = keep
    rows: View = keep
    columns: View = keep
    factor: float = 1.0


WHOLE = Piece()
Key = Callable[[Numbers], Any]
Pieces = Callable[[Numbers], tuple[Piece, ...]]


def whole_tensor(_: Numbers) -> tuple[Piece, ...]:
    """Return one piece, the whole tensor as it is."""
    return (WHOLE,)


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the file that is made from one tensor of the model.

    Attributes:
        name: Its name; in a layer, what follows ``blk.N.``.
        pieces: Returns the pieces that it consists of, one behind the other.
        change: Function of each value.
        offset: Number to add to each value.
        leaves: Whether the model computes with none of the values that the pieces leave out.
    """

    name: str
    pieces: Pieces = whole_tensor
    change: Change = Change.NONE
    offset: float = 0.0
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Heads:
    """Layers behind the last one that predict further tokens (multi-token prediction).

    Attributes:
        prefixes: Beginnings of the names of their tensors; ``{layer}`` stands for the number of the layer, counted on from the last one.
        names: What stands in the place of such beginnings, in a layer behind the last one; ``{index}`` stands for the number of the head.
            Tensors without an entry have no place in the file, and are left out.
    """

    prefixes: tuple[str, ...]
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model without a language head makes of a text: the vectors of its tokens, which become one, or a score.

    Attributes:
        poolings: How the graph makes one vector of those of the tokens, by sentence-transformers' names.
        layers: Most linear layers behind the pooling.
        scores: Whether a head makes a score of the text instead.
        approximates: Whether the graph approximates the GELU of the class by tanh.
    """

    poolings: tuple[str, ...] = ("mean", "cls", "lasttoken")
    layers: int = 0
    scores: bool = False
    approximates: bool = False


Refusal = Callable[["Architecture", Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture of llama.cpp, for a class of transformers.

    Attributes:
        name: Its name in a GGUF file, and the beginning of the keys of its numbers.
        kind: The class of transformers, with the defaults of its code.
        when: Whether the entry is for a model with these settings; None for all of the class. The first entry that is for a model counts.
        assumes: Values that the graph assumes for settings; a setting may also be missing or null.
        rope: Kinds of rope scaling that the graph computes; empty if it has no rotary embedding.
        paired: Whether the rotary embedding turns neighbouring values, so that rows of queries and keys change their order.
        scales_yarn: Whether the graph scales attention by YaRN's ``mscale_all_dim``, which the metadata has a key for.
        rounds_yarn: Whether models of the class whose YaRN does not round the ends of its range (``truncate``) are computed with rounded ends.
        partial: Whether the graph turns a part of each head if the model does.
        transposed: Ends of the names of weights that are stored as (in, out).
        has_windows: Whether the graph computes layers with a sliding window.
        experts: Settings of which one has the number of experts; empty if there are none.
        dense: Setting with the number of layers at the beginning that have no experts.
        sparse: Returns whether a layer has experts, by its number, where these are not all layers behind the first.
        tensors: What becomes of tensors that have another name or other values in the file: by name, in a layer by what follows its number.
        stacks: Beginnings of the names of tensors, in a layer of what follows its number, that only differ in a number behind it, and the name
            of the tensor that they become together.
        scalars: Ends of the names of tensors with one value in each layer, by what follows its number, and the key whose list they become.
        everywhere: Ends of the names of tensors that llama.cpp wants in all layers, also in those that use none of their own: they get the
            first layer's.
        keys: Keys of the metadata beside those that all have, or instead of them; None leaves a key out.
        factors: Returns tensors of numbers that come from settings, by name, such as divisors of the rotary embedding's frequencies.
        unadapted: Ends of the names of tensors whose products the graph computes without an adapter's factors.
        needs: Names of tensors that each file has.
        lacks: Names of tensors that a layer has not, although others of its kind have one.
        refuses: Returns why a model's settings are not computed; an empty text if they are.
        heads: Layers that predict further tokens, for classes that may have them.
        exact_gelu: Whether the class has the exact GELU although no setting says it; the graph approximates it by tanh.
        reading: What the model makes of a text, for classes without a language head.
        rename: Returns the name of a tensor as ``tensors`` and gguf know it; an empty text for a tensor that no result depends on.
        wholes: Classes that take more than text and have a text part of this class, with the type of that part; ``""`` is any type.
        notes: What readers of docs/gguf.md shall know of the file beside what the other attributes say.
    """

    name: str
    kind: DecoderClass
    when: Callable[[Mapping[str, Any]], bool] | None = None
    assumes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    rope: tuple[str, ...] = ("linear", "yarn")
    paired: bool = False
    scales_yarn: bool = False
    rounds_yarn: bool = False
    partial: bool = False
    transposed: tuple[str, ...] = ()
    has_windows: bool = False
    experts: tuple[str, ...] = ()
    dense: str = ""
    sparse: Callable[[Numbers, int], bool] | None = None
    tensors: Mapping[str, tuple[Target, ...]] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)
    scalars: Mapping[str, str] = field(default_factory=dict)
    everywhere: tuple[str, ...] = ()
    keys: Mapping[str, Callable[[Numbers], Any]] = field(default_factory=dict)
    factors: Callable[[Numbers], Mapping[str, tuple[float, ...]]] | None = None
    unadapted: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("token_embd.weight", "output_norm.weight")
    lacks: tuple[str, ...] = ()
    refuses: Refusal | None = None
    heads: Heads | None = None
    exact_gelu: bool = False
    reading: Reading | None = None
    rename: Callable[[str], str] | None = None
    wholes: Mapping[str, str] = field(default_factory=dict)
    notes: str = ""

    @property
    def class_name(self) -> str:
        """Name of the class of transformers."""
        return self.kind.name
