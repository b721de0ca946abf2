"""A receipt for units of tests, in a module that Ray's workers can import."""

from scone_core.artifacts.config import Frozen


class Result(Frozen):
    value: int
