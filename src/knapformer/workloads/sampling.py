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
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from knapformer.errors import CapacityError, ConfigurationError
from knapformer.given.cost import CostModel

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]

Mean = Literal["sample_mean", "token_mean"]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How steps are made of the samples that are left.

    Attributes:
        num_ranks: that load samples.
        samples_per_rank: in a batch, where no cap closes it earlier.
        tokens_per_rank: at most, in a batch of more than one sample; one of the two is given.
        max_tokens_per_rank: cap on the tokens of a batch.
        max_work_per_rank_s: cap on the work of a batch of more than one sample, in seconds of one layer's forward pass.
        balance: the free mix. Caps are then those of a rank's share of the step.
        cost: what lengths cost.

    Raises:
        ConfigurationError: a value is none of its kind.
    """

    num_ranks: int
    samples_per_rank: int | None = None
    tokens_per_rank: int | None = None
    max_tokens_per_rank: int | None = None
    max_work_per_rank_s: float | None = None
    balance: bool = False
    cost: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        for name in ("num_ranks", "samples_per_rank", "tokens_per_rank", "max_tokens_per_rank"):
            value = getattr(self, name)
            if value is None and name != "num_ranks":
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ConfigurationError(f"{name} must be an integer of at least 1, got {value!r}")
            object.__setattr__(self, name, int(value))
        if (self.samples_per_rank is None) == (self.tokens_per_rank is None):
            raise ConfigurationError(
                "give samples_per_rank or tokens_per_rank, one of them, "
                f"got {self.samples_per_rank!r} and {self.tokens_per_rank!r}"
            )
        work = self.max_work_per_rank_s
        if work is not None and (isinstance(work, bool) or not isinstance(work, int | float) or not work > 0):
            raise ConfigurationError(f"max_work_per_rank_s must be a number above 0, got {work!r}")
        if not isinstance(self.balance, bool) or not isinstance(self.cost, CostModel):
            raise ConfigurationError(
                f"needs balance True or False and a CostModel, got {self.balance!r}, {self.cost!r}"
            )

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Arrangement:
        """Of ``to_dict``'s content.

        Raises:
            ConfigurationError: it is not.
        """
        names = {f.name for f in fields(cls)}
        if not isinstance(content, Mapping) or set(content) != names:
            raise ConfigurationError(f"an arrangement has the keys {sorted(names)}, got {content!r}")
        return cls(**{**content, "cost": CostModel.from_dict(content["cost"])})

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    @property
    def most_tokens(self) -> int | None:
        """Tokens of a batch of more than one sample."""
        limits = [limit for limit in (self.tokens_per_rank, self.max_tokens_per_rank) if limit is not None]
        return min(limits, default=None)


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


@dataclass(frozen=True)
class Steps:
    """Samples in the order of their steps.

    Attributes:
        samples: (S,) positions in the data set.
        batch_offsets: (B + 1,) where batches begin in ``samples``.
        step_offsets: (steps + 1,) where steps begin among the batches.
    """

    samples: IntArray
    batch_offsets: IntArray
    step_offsets: IntArray

    def __len__(self) -> int:
        return len(self.step_offsets) - 1

    def batches(self, step: int) -> list[IntArray]:
        """The samples of each batch of a step."""
        first, last = self.step_offsets[step : step + 2]
        bounds = self.batch_offsets[first : last + 1]
        return [self.samples[start:end] for start, end in pairwise(bounds)]

    def samples_before(self, step: int) -> IntArray:
        """All samples of the steps before one."""
        return self.samples[: self.batch_offsets[self.step_offsets[step]]]


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


def arrange(
    tokens: IntArray, samples: IntArray, arrangement: Arrangement, rng: np.random.Generator | None = None
) -> Steps:
    """Cut samples into steps.

    Args:
        tokens: (S,) of all samples of the data set.
        samples: those that are left, in the order of the shuffle.
        arrangement: how.
        rng: shuffles the steps of whole samples; without it the heaviest come first. A step of fewer batches than ranks
            is the last one.

    Raises:
        CapacityError: a sample is longer than a rank (a whole step, with ``balance``) may hold.
    """
    share = arrangement.num_ranks if arrangement.balance else 1
    own_tokens, own_work = tokens[samples], arrangement.cost.work_s(tokens[samples])
    _check_cap(samples, own_tokens, arrangement.max_tokens_per_rank, share)
    room = _Room(
        arrangement.num_ranks,
        (arrangement.samples_per_rank or len(samples)) * share,
        None if arrangement.most_tokens is None else arrangement.most_tokens * share,
        None if arrangement.max_work_per_rank_s is None else arrangement.max_work_per_rank_s * share,
    )
    bounds = _cut(own_tokens, own_work, room)
    if arrangement.balance:
        bounds = _fill_last(bounds, arrangement.num_ranks)
        return Steps(samples, bounds, np.arange(len(bounds), dtype=np.int64))
    return _group(samples, bounds, own_work, arrangement.num_ranks, rng)


def _cut(tokens: IntArray, work_s: FloatArray, room: _Room) -> IntArray:
    """(B + 1,) bounds of batches along the samples, each as long as there is room."""
    sums = [
        (np.concatenate([[0], np.cumsum(values)]), limit)
        for values, limit in ((tokens, room.tokens), (work_s, room.work_s))
        if limit is not None
    ]
    bounds = [0]
    while bounds[-1] < len(tokens):
        start = bounds[-1]
        end = min(len(tokens), start + room.samples)
        for running, limit in sums:
            end = min(end, int(np.searchsorted(running, running[start] + limit, "right")) - 1)
        bounds.append(max(end, start + 1))
    return np.asarray(bounds, np.int64)


def _fill_last(bounds: IntArray, num_ranks: int) -> IntArray:
    """The last step gets a sample for every rank, where the step before it can spare them."""
    if len(bounds) < 3:
        return bounds
    missing = num_ranks - int(bounds[-1] - bounds[-2])
    if 0 < missing <= bounds[-2] - bounds[-3] - num_ranks:
        bounds = bounds.copy()
        bounds[-2] -= missing
    return bounds


def _group(
    samples: IntArray, bounds: IntArray, work_s: FloatArray, num_ranks: int, rng: np.random.Generator | None
) -> Steps:
    """Batches of like work become a step, the heaviest ones first; what is left over are the lightest."""
    if len(bounds) == 1:
        return Steps(samples, bounds, np.zeros(1, np.int64))
    heaviest_first = np.argsort(-np.add.reduceat(work_s, bounds[:-1]), kind="stable")
    batches = [samples[bounds[i] : bounds[i + 1]] for i in heaviest_first]
    num_full = len(batches) // num_ranks
    full, rest = batches[: num_full * num_ranks], batches[num_full * num_ranks :]
    if rest:
        full, rest = _spare(full, rest, num_ranks)
    order = np.arange(num_full) if rng is None else rng.permutation(num_full)
    batches = [full[step * num_ranks + i] for step in order for i in range(num_ranks)] + rest
    counts = np.asarray([num_ranks] * num_full + ([len(rest)] if rest else []), np.int64)
    sizes = np.asarray([len(batch) for batch in batches], np.int64)
    return Steps(np.concatenate(batches), _offsets(sizes), _offsets(counts))


def _spare(full: list[IntArray], rest: list[IntArray], num_ranks: int) -> tuple[list[IntArray], list[IntArray]]:
    """Single samples of the lightest full batches move to the left-over ones, until there is one for every rank.

    Where all full batches have one sample only, some ranks stay without.
    """
    missing, kept, taken = num_ranks - sum(map(len, rest)), list(full), list(rest)
    for index in range(len(full) - 1, -1, -1):
        count = min(missing, len(full[index]) - 1)
        if count > 0:
            kept[index], spared = np.split(full[index], [-count])
            taken += np.split(spared, count)
            missing -= count
    return kept, taken


def deal(batches: Sequence[IntArray], tokens: IntArray, work_s: FloatArray, arrangement: Arrangement) -> list[IntArray]:
    """The samples of each rank, in one step.

    Heaviest first, each to the rank with the least work that has room; with ``balance``, where work is dealt out anew
    later, the longest first, each to the rank with the fewest tokens. Where that breaks a limit, or leaves the slowest
    rank slower than the step's own batches do, these are taken as they are. Each rank gets a sample where there are
    enough; ties go to the rank with fewer samples, then to the lower one.

    Args:
        batches: the samples of the step; at most one batch for each rank, or a single one with all of them.
        tokens, work_s: (S,) of all samples of the data set.
        arrangement: says how much a rank may take.
    """
    samples = np.concatenate(batches) if batches else np.zeros(0, np.int64)
    most_samples = arrangement.samples_per_rank or len(samples)
    room = _Room(arrangement.num_ranks, most_samples, arrangement.most_tokens, arrangement.max_work_per_rank_s)
    if arrangement.balance:
        dealt = _least_loaded(samples, tokens.astype(np.float64), tokens, replace(room, tokens=None, work_s=None))
        assert dealt is not None
        return dealt
    dealt = _least_loaded(samples, work_s, tokens, room)
    own = _one_each([*batches, *[samples[:0]] * (arrangement.num_ranks - len(batches))])
    if dealt is None or _slowest(dealt, work_s) >= _slowest(own, work_s):
        return own
    return dealt


@dataclass(frozen=True, slots=True)
class _Room:
    """What each of so many ranks may take; tokens and work hold for more than one sample."""

    num_ranks: int
    samples: int
    tokens: int | None
    work_s: float | None

    def holds(self, num_samples: int, num_tokens: int, work_s: float) -> bool:
        if num_samples == 1:
            return True
        return (
            num_samples <= self.samples
            and (self.tokens is None or num_tokens <= self.tokens)
            and (self.work_s is None or work_s <= self.work_s)
        )


def _least_loaded(samples: IntArray, work_s: FloatArray, tokens: IntArray, room: _Room) -> list[IntArray] | None:
    """None where a sample found no room."""
    ranks = [(0.0, 0, rank, 0) for rank in range(room.num_ranks)]
    dealt: list[list[int]] = [[] for _ in ranks]
    for sample in samples[np.argsort(-work_s[samples], kind="stable")].tolist():
        full = []
        while ranks:
            load, count, rank, held = heapq.heappop(ranks)
            load_after, held_after = load + float(work_s[sample]), held + int(tokens[sample])
            if room.holds(count + 1, held_after, load_after):
                dealt[rank].append(sample)
                heapq.heappush(ranks, (load_after, count + 1, rank, held_after))
                break
            if count < room.samples:
                full.append((load, count, rank, held))
        else:
            return None
        for entry in full:
            heapq.heappush(ranks, entry)
    return [np.asarray(own, np.int64) for own in dealt]


def _one_each(batches: list[IntArray]) -> list[IntArray]:
    """Ranks without a sample get one of those with the most, while any has two."""
    for rank, own in enumerate(batches):
        fullest = max(range(len(batches)), key=lambda r: (len(batches[r]), -r))
        if len(own) == 0 and len(batches[fullest]) > 1:
            batches[rank], batches[fullest] = batches[fullest][-1:], batches[fullest][:-1]
    return batches


def _slowest(batches: Sequence[IntArray], work_s: FloatArray) -> float:
    return max((float(work_s[own].sum()) for own in batches), default=0.0)


def _check_cap(samples: IntArray, tokens: IntArray, cap: int | None, share: int) -> None:
    if cap is None or not len(tokens) or int(tokens.max()) <= cap * share:
        return
    longest = int(np.argmax(tokens))
    raise CapacityError(
        f"sample {samples[longest]} has {tokens[longest]} tokens, max_tokens_per_rank {cap} allows "
        + (f"{cap * share} over {share} ranks" if share > 1 else f"{cap} on a rank, and only balance=True splits it")
    )


def _check_done(num_steps: int, num_there: int) -> None:
    if not 0 <= num_steps <= num_there:
        raise ConfigurationError(f"{num_steps} steps are said to be done of an epoch of {num_there}")


def _offsets(counts: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def _generator(*seeds: int) -> np.random.Generator:
    """Its own, so that no global random state takes part."""
    return np.random.Generator(np.random.PCG64(list(seeds)))


def digest(values: IntArray) -> str:
    """Of integers, the same on every machine."""
    return hashlib.sha256(np.ascontiguousarray(values, "<i8").tobytes()).hexdigest()[:16]
