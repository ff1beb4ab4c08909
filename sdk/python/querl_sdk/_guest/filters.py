"""The interface `filters`."""

from __future__ import annotations

from wit_world.exports import filters as wit

from ..filter import Sample
from ..registry import exported
from ..types import Rejection
from . import convert, host
from .errors import explained


# As in `convert`: replaces the binding class. Only `columns` still needs a conversion.
wit.Sample = Sample
_KEEP = wit.Verdict_Keep()


@explained
class Filters:
    def check_batch(self, samples):
        check = exported()["filter"](host.settings()).check
        return [_verdict(check, sample) for sample in samples]


def _verdict(check, sample: Sample):
    sample.columns = convert.columns(sample.columns)
    try:
        kept = check(sample)
    except Rejection as rejection:
        return wit.Verdict_Drop(convert.rejection(rejection))
    if kept is not None:
        raise TypeError(f"check() returned {kept!r}; expected nothing for a sample that stays, or a raised Rejection")
    return _KEEP
