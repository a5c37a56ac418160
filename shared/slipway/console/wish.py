"""What somebody asks for on the form of a new export: texts, until they are loaded as the command line loads its flags."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slipway.advice.for_target import load_configuration
from slipway.configuration import LoadedConfiguration
from slipway.errors import ConfigurationError
from slipway.texts import hidden_character

_MOST_CHARACTERS = 4096
_MOST_NAME_BYTES = 255
_MOST_FORMATS, _MOST_SETTINGS = 64, 64


@dataclass(frozen=True, slots=True)
class Wish:
    """The fields of the form.

    Attributes:
        run: Training run or checkpoint; empty exports the base as it is.
        base: Base model; empty takes the one that the run names.
        formats: The outputs, each as after ``-f``.
        target: Where the model shall run, in place of outputs.
        out: Folder that receives the export's own folder; empty for the usual one.
        assignments: Further settings, each as after ``--set``.
        project: Project of the export at a coordinator; empty for the usual one.
        form: Name of the form, which differs each time that it is shown.
        seen: The model for which the form shows sizes, as :attr:`model` writes it.
    """

    run: str = ""
    base: str = ""
    formats: tuple[str, ...] = ()
    target: str = ""
    out: str = ""
    assignments: tuple[str, ...] = ()
    project: str = ""
    form: str = ""
    seen: str = ""

    @classmethod
    def of(cls, fields: Iterable[tuple[str, str]]) -> Wish:
        """Read the fields as a browser sends them.

        Raises:
            ConfigurationError: ``CONFIGURATION_INVALID``: a field is too long, or has a hidden character.
        """
        texts: dict[str, str] = {}
        formats: list[str] = []
        for name, value in fields:
            _check(name, value)
            if name == "formats":
                formats.append(value)
            else:
                texts[name] = value.strip()
        lines = [line.strip() for line in texts.get("settings", "").splitlines()]
        assignments = tuple(line for line in lines if line)
        if len(formats) > _MOST_FORMATS or len(assignments) > _MOST_SETTINGS:
            raise _refused("there are too many outputs or settings", "ask for fewer")
        return cls(
            run=texts.get("run", ""),
            base=texts.get("base", ""),
            formats=tuple(formats),
            target=texts.get("target", ""),
            out=texts.get("out", ""),
            assignments=assignments,
            project=texts.get("project", ""),
            form=texts.get("form", ""),
            seen=texts.get("seen", ""),
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is named that could be exported."""
        return not self.run and not self.base

    @property
    def model(self) -> str:
        """The model that would be exported, in one text."""
        return f"{self.run}|{self.base}"

    @property
    def request_id(self) -> str:
        """The same for the same form with the same fields, so that a second click asks for nothing new; empty without a form."""
        if not self.form:
            return ""
        asked = repr(
            (self.form, self.run, self.base, self.formats, self.target, self.out, self.assignments, self.project)
        )
        return hashlib.sha256(asked.encode()).hexdigest()[:32]

    def load(self, *, environment: Mapping[str, str] = os.environ) -> LoadedConfiguration:
        """Return the configuration, as the command loads it from its flags.

        Args:
            environment: Has the ``EXPORT_*`` variables.

        Raises:
            ConfigurationError: All problems at once.
        """
        flags = {"RUN": self.run, "--base-model": self.base, "--target": self.target, "--out": self.out}
        return load_configuration(
            None,
            environment=environment,
            flags={name: value or None for name, value in flags.items()},
            assignments=self.assignments,
            requested=self.formats,
        )

    def command(self, *options: str) -> str:
        """Return the command that does the same.

        Args:
            options: Words of the connection to a coordinator.
        """
        words = ["slipway", "export", *([self.run] if self.run else [])]
        words += ["-f", ",".join(self.formats)] if self.formats else []
        for flag, value in (("--target", self.target), ("--base-model", self.base), ("--out", self.out)):
            words += [flag, value] if value else []
        words += [word for each in self.assignments for word in ("--set", each)]
        project = ["--project", self.project] if self.project else []
        return shlex.join([*words, *options, *project])


def _check(name: str, value: str) -> None:
    if len(value) > _MOST_CHARACTERS:
        raise _refused(f"the field {name} has {len(value)} characters", f"use at most {_MOST_CHARACTERS}")
    if any(len(part.encode()) > _MOST_NAME_BYTES for part in value.split("/")) and name in {"run", "base", "out"}:
        raise _refused(
            f"the field {name} has a name of more than {_MOST_NAME_BYTES} bytes", "name a folder that exists"
        )
    hidden = hidden_character(value.replace("\r\n", "").replace("\n", ""))
    if hidden:
        raise _refused(f"the field {name} has the hidden character {hidden}", "type it without")


def _refused(what: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(what, reason="CONFIGURATION_INVALID", remedy=remedy)
