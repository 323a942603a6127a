"""The exception types a user of KnapFormer can catch.

Errors that one rank causes are raised with the same type and text on every rank of the balancing group.
"""

MOST_CHARACTERS = 2000
"""Of an error's text: values that it quotes may be as long as a file."""


class KnapFormerError(Exception):
    """Base of every error that KnapFormer raises on purpose."""

    def __init__(self, text: str = "") -> None:
        if len(text) > MOST_CHARACTERS:
            half = MOST_CHARACTERS // 2
            text = f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"
        super().__init__(text)


class ConfigurationError(KnapFormerError, ValueError):
    """A setting, preset, topology, file or argument that cannot be used."""


class LengthsError(KnapFormerError, ValueError):
    """Sequence lengths that are no lengths, or that do not fit the tensors they describe."""


class PlanError(KnapFormerError, ValueError):
    """A plan that does not place every token and every head exactly once."""


class CapacityError(KnapFormerError, ValueError):
    """The tokens of a step do not fit under the caps that the ranks were given."""


class RankError(KnapFormerError, RuntimeError):
    """Another part of the program (a data loader, say) failed on one rank; raised on all of them."""


class DisagreementError(KnapFormerError, RuntimeError):
    """The ranks of a balancing group run different versions, configurations or plans."""
