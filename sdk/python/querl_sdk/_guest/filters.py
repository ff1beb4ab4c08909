"""The interface `filters`."""

from __future__ import annotations

from wit_world.exports import filters as wit

from ..filter import Sample
from ..registry import exported
from ..types import Rejection
from . import convert, host
from .errors import explained


@explained
class Filters:
    def check_batch(self, samples):
        plugin = exported()["filter"](host.settings())
        return [_verdict(plugin, _sample(sample)) for sample in samples]


def _sample(value) -> Sample:
    return Sample(
        value.id,
        value.original_query,
        value.rewritten_query,
        value.context,
        value.hits,
        convert.columns(value.columns),
    )


def _verdict(plugin, sample: Sample):
    try:
        kept = plugin.check(sample)
    except Rejection as rejection:
        return wit.Verdict_Drop(convert.rejection(rejection))
    if kept is not None:
        raise TypeError(f"check() returned {kept!r}; expected nothing for a sample that stays, or a raised Rejection")
    return wit.Verdict_Keep()
