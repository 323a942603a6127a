"""Which samples train together: an epoch cut into steps, and a step's samples dealt to the ranks.

An epoch is one shuffle of all samples. How it becomes steps is an ``Arrangement``; there are two ways:

    whole samples   the shuffle is cut into batches that keep the caps. Batches of like work then form a step, so that
                    its ranks take equally long although no sample is ever split. Steps are shuffled.
    free mix        (``balance``) the shuffle is cut into steps as it is, for a planner that balances each of them.

Either way a batch is closed before a cap would break. What is done of an epoch is a list of arrangements with the steps
that were taken under each: enough to find the samples that are left, whatever number of ranks goes on with them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from knapformer.errors import ConfigurationError
from knapformer.workloads.arrangement import Arrangement
from knapformer.workloads.cutting import arrange
from knapformer.workloads.dealing import deal

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]

Mean = Literal["sample_mean", "token_mean"]


@dataclass(frozen=True, slots=True)
class SampledStep:
    """The samples of one step.

    Attributes:
        batches: of each rank, the positions of its samples in the data set.
        tokens: of each rank.
    """

    batches: tuple[list[int], ...]
    tokens: tuple[int, ...]

    @property
    def num_samples(self) -> int:
        """Of all ranks."""
        return sum(map(len, self.batches))

    @property
    def num_tokens(self) -> int:
        """Of all ranks."""
        return sum(self.tokens)

    def loss_weight(self, rank: int, mean: Mean = "sample_mean") -> float:
        """What a rank multiplies its own mean loss by, so that the average over ranks is the mean over the step.

        With ``N`` ranks, ``N · (samples of the rank) / (samples of the step)`` for the mean over samples of each
        sample's loss; with tokens in the place of samples for the mean over tokens. 0 for a rank without samples.

        Raises:
            ConfigurationError: another ``mean``.
        """
        if mean not in ("sample_mean", "token_mean"):
            raise ConfigurationError(f"mean must be 'sample_mean' or 'token_mean', got {mean!r}")
        own = len(self.batches[rank]) if mean == "sample_mean" else self.tokens[rank]
        total = self.num_samples if mean == "sample_mean" else self.num_tokens
        return len(self.batches) * own / total if total else 0.0


Done: TypeAlias = tuple[tuple[Arrangement, int], ...]
"""What is done of an epoch: arrangements, one after another, and the steps taken under each."""


class Epoch:
    """One epoch from where it stands: pure, and the same on every rank.

    Args:
        tokens: (S,) of each sample.
        arrangement: of the steps that are left.
        seed, epoch: of the shuffle.
        shuffle: False takes samples in their own order; whole samples are grouped all the same.
        done: steps that were taken already. Those under an arrangement equal to this one are counted as its own.

    Raises:
        CapacityError: a sample is longer than a rank may hold.
        ConfigurationError: more steps are done than there are.
    """

    def __init__(
        self,
        tokens: IntArray,
        arrangement: Arrangement,
        *,
        seed: int,
        epoch: int,
        shuffle: bool = True,
        done: Done = (),
    ) -> None:
        self.tokens, self.arrangement, self.seed, self.number = tokens, arrangement, seed, epoch
        if done and done[-1][0] == arrangement:
            done, self.first_step = done[:-1], done[-1][1]
        else:
            self.first_step = 0
        self.done = done
        left: IntArray = np.arange(len(tokens), dtype=np.int64)
        if shuffle:
            left = _generator(seed, epoch).permutation(len(tokens)).astype(np.int64)
        for index, (earlier, num_steps) in enumerate(done):
            steps = arrange(tokens, left, earlier, _generator(seed, epoch, index + 1) if shuffle else None)
            _check_done(num_steps, len(steps))
            left = left[np.isin(left, steps.samples_before(num_steps), invert=True)]
        rng = _generator(seed, epoch, len(done) + 1) if shuffle else None
        self.steps = arrange(tokens, left, arrangement, rng)
        _check_done(self.first_step, len(self.steps))

    @property
    def num_earlier(self) -> int:
        """Steps under earlier arrangements."""
        return sum(num_steps for _, num_steps in self.done)

    @property
    def num_steps(self) -> int:
        """Steps of the whole epoch, done or not."""
        return self.num_earlier + len(self.steps)

    def done_after(self, num_steps: int) -> Done:
        """What is done when so many steps of the whole epoch are.

        Raises:
            ConfigurationError: there are not so many, or some of the earlier arrangements' are undone by it.
        """
        if not self.num_earlier <= num_steps <= self.num_steps:
            raise ConfigurationError(
                f"steps done must be in {self.num_earlier}..{self.num_steps} of this epoch, got {num_steps}"
            )
        return (*self.done, (self.arrangement, num_steps - self.num_earlier))

    def step(self, index: int) -> SampledStep:
        """A step, by its place in the whole epoch; of those under earlier arrangements there are none any more.

        Raises:
            ConfigurationError: there is none at ``index``.
        """
        if not self.num_earlier <= index < self.num_steps:
            raise ConfigurationError(f"this epoch has the steps {self.num_earlier}..{self.num_steps - 1}, got {index}")
        dealt = deal(self.steps.batches(index - self.num_earlier), self.tokens, self._work_s, self.arrangement)
        tokens = tuple(int(self.tokens[own].sum()) for own in dealt)
        return SampledStep(tuple(own.tolist() for own in dealt), tokens)

    @cached_property
    def _work_s(self) -> FloatArray:
        return self.arrangement.cost.work_s(self.tokens)


def _check_done(num_steps: int, num_there: int) -> None:
    if not 0 <= num_steps <= num_there:
        raise ConfigurationError(f"{num_steps} steps are said to be done of an epoch of {num_there}")


def _generator(*seeds: int) -> np.random.Generator:
    """Its own, so that no global random state takes part."""
    return np.random.Generator(np.random.PCG64(list(seeds)))


def digest(values: IntArray) -> str:
    """Of integers, the same on every machine."""
    return hashlib.sha256(np.ascontiguousarray(values, "<i8").tobytes()).hexdigest()[:16]
