"""What a runner writes of prompts with a picture or sound (:mod:`slipway.proof.sights`)."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from slipway.files.json_documents import LARGEST_LIST
from slipway.files.regular_file import read_regular
from slipway.validation.pictures import Sense

PICTURES_FILE = "pictures.json"
"""In the folder of a run's results that has the name of the sense: a :class:`Looked`. Beside it are files of logits as those of windows,
(N, P, V), N = prompts, P = tokens behind each picture."""
PICTURE_TOKENS = 24
"""Tokens behind each picture whose results are compared."""
ENDED = "its process ended while it computed a prompt"


class Looked(BaseModel):
    """What a model computed of the prompts.

    Attributes:
        sense: What the prompts have beside text.
        pictures: Number of prompts.
        tokens: Tokens behind each that have results.
        not_run: Why there are none, though nothing is known to be wrong.
        failed: Why there are none, though there should be.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sense: Sense = Field(default=Sense.PICTURES, exclude_if=lambda value: value is Sense.PICTURES)
    pictures: int = 0
    tokens: int = 0
    not_run: str = ""
    failed: str = ""

    def write(self, run: Path) -> None:
        """Write it into the folder of a run's results."""
        (run / self.sense / PICTURES_FILE).write_text(self.model_dump_json(), encoding="utf-8")

    @classmethod
    def read(cls, run: Path, sense: Sense = Sense.PICTURES) -> Looked | None:
        """Read it from the folder of a run's results; None if the run was not asked for what this sense takes.

        Raises:
            ValueError: The file holds something else, or results of another sense.
            OSError: It cannot be read.
        """
        if not (run / sense).is_dir():
            return None
        file = run / sense / PICTURES_FILE
        if not file.is_file():
            return cls(sense=sense, not_run=ENDED)
        said = cls.model_validate_json(read_regular(file, largest=LARGEST_LIST))
        if said.sense is not sense:
            raise ValueError(f"{sense}/{PICTURES_FILE} is of {said.sense}")
        return said
