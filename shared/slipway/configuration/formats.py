"""Build the section ``formats:`` from the sections of the installed formats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import create_model

from slipway.configuration.values import Levels
from slipway.formats.contract import Format
from slipway.formats.registry import formats
from slipway.formats.settings import FormatSettings
from slipway.settings.sections import Section


class FormatsSection(Section):
    """The formats to deliver: one section per installed format."""

    def __getitem__(self, name: str) -> FormatSettings:
        """Return the section of a format."""
        section: FormatSettings = getattr(self, name)
        return section

    def enabled(self) -> Iterator[tuple[Format[Any], FormatSettings]]:
        """Yield the enabled formats with their sections, in the order of the formats."""
        for name, each in formats().items():
            if self[name].enabled:
                yield each, self[name]


def _section(each: Format[Any]) -> type[FormatSettings]:
    """Return the format's section, changed to check the names of levels, for which all formats must be known."""
    if not each.levels:
        return each.settings
    model: type[FormatSettings] = create_model(
        each.settings.__name__,
        __base__=each.settings,
        __doc__=each.settings.__doc__,
        quantization=(Levels | None, each.settings.model_fields["quantization"].default),
    )
    return model


if TYPE_CHECKING:
    FormatsConfiguration = FormatsSection
else:
    FormatsConfiguration = create_model(
        "FormatsConfiguration",
        __base__=FormatsSection,
        __doc__=FormatsSection.__doc__,
        **{name: (section, section()) for name, each in formats().items() if (section := _section(each))},
    )
