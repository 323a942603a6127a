"""A batch sampler that gives ranks whole samples in balance, for loops that leave their model as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from knapformer import errors
from knapformer.errors import ConfigurationError, DisagreementError, KnapFormerError, LengthsError
from knapformer.execution.groups import BalancingGroup, gather_values, subgroup
from knapformer.given.cost import CostModel
from knapformer.given.lengths import IntArray, parse_local_lengths
from knapformer.training.sampler_state import MOST_SEED, SCHEMA, read_state
from knapformer.workloads.arrangement import Arrangement
from knapformer.workloads.sampling import Done, Epoch, SampledStep, digest


class BalancedBatchSampler(Sampler[list[int]]):
    """Batches of sample positions, for ``DataLoader(dataset, batch_sampler=…)``.

    In an epoch every sample comes once, on one rank. All ranks take equally many batches. No global random state is
    read or changed.

    Without ``balance`` the batches of a step take equally long, by the cost model, and no sample is ever split. A batch
    is empty only where fewer samples than ranks are left, in the last step. With ``balance`` a step is a random mix of
    everything, meant for a ``Balancer`` with the planner ``moldable``; where it has fewer samples than there are ranks,
    some load none.

    An iteration begins where ``load_state_dict`` or ``set_epoch`` put it, else at the epoch's start; after one that
    came to the end, the next one is of the next epoch.

    Args:
        lengths: tokens of every sample, in the data set's order; or a mapping of stream names to such lists.
        samples_per_rank: samples of a batch; fewer where a cap closes it earlier.
        tokens_per_rank: or tokens of a batch, at most; a longer sample comes alone. One of the two is given.
        max_tokens_per_rank: hard cap on the tokens of a rank. With ``balance`` a step has at most as many times the
            number of ranks; give ``Balancer`` the same.
        max_work_per_rank_s: cap on the work of a batch of more than one sample, in seconds of one layer's forward pass
            (``cost.work_s``).
        balance: mix freely.
        cost: what lengths cost; by default FLUX.1's width. Ranks count as equally fast.
        seed: of the shuffle.
        shuffle: False takes samples in their own order where ``balance`` is given, the heaviest steps first where not.
        rank, num_ranks: who loads. By default those of ``group``, and then every rank of it must make the sampler, at
            the same point: the ranks compare what they were given, and all take rank 0's seed.
        group: default the default group; without torch.distributed this is one rank alone.
        in_turns: the batches of all ranks one after another, rank 0's first: what ``accelerate``'s ``prepare`` deals
            out itself.

    Raises:
        ConfigurationError: arguments that are none or do not fit each other.
        LengthsError: lengths that are none.
        CapacityError: a sample is longer than the cap allows.
        DisagreementError: ranks have other lengths or settings, naming the rank; on all ranks.
    """

    batch_size = None
    """Batches have different sizes; ``accelerate`` asks."""
    drop_last = False

    def __init__(
        self,
        lengths: Any,
        *,
        samples_per_rank: int | None = None,
        tokens_per_rank: int | None = None,
        max_tokens_per_rank: int | None = None,
        max_work_per_rank_s: float | None = None,
        balance: bool = False,
        cost: CostModel | None = None,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        num_ranks: int | None = None,
        group: dist.ProcessGroup | None = None,
        in_turns: bool = False,
    ) -> None:
        together = _control_group(group) if rank is None and num_ranks is None else None
        if together:
            rank, num_ranks = together.rank, together.size
        failure: KnapFormerError | None = None
        try:
            if (rank is None) != (num_ranks is None):
                raise ConfigurationError(f"give rank and num_ranks, or neither, got {rank!r} and {num_ranks!r}")
            self._tokens = _tokens_of(lengths)
            self._arrangement = Arrangement(
                num_ranks=1 if num_ranks is None else num_ranks,
                samples_per_rank=samples_per_rank,
                tokens_per_rank=tokens_per_rank,
                max_tokens_per_rank=max_tokens_per_rank,
                max_work_per_rank_s=max_work_per_rank_s,
                balance=balance,
                cost=CostModel() if cost is None else cost,
            )
            self._rank = _checked("rank", 0 if rank is None else rank, self._arrangement.num_ranks - 1)
            self._seed = _checked("seed", seed, MOST_SEED)
        except KnapFormerError as error:
            failure = error
        self._shuffle, self._in_turns = bool(shuffle), bool(in_turns)
        if together:
            self._seed = self._agree(together, failure)
        elif failure is not None:
            raise failure
        self._epoch = self._fresh_epoch(0)
        self._handed_out = 0
        """Steps of this epoch that are done or handed out, those of earlier arrangements among them."""

    @property
    def epoch(self) -> int:
        """The epoch of the last iteration, or of the next one where none has begun."""
        return self._epoch.number

    @property
    def num_steps(self) -> int:
        """Steps of this epoch."""
        return self._epoch.num_steps

    @property
    def num_steps_done(self) -> int:
        """Steps of this epoch that were done where the iteration begins: 0, unless it was resumed."""
        return self._epoch.num_earlier + self._epoch.first_step

    @property
    def sampler(self) -> BalancedBatchSampler:
        """Itself: ``accelerate`` looks for ``set_epoch`` here."""
        return self

    def __len__(self) -> int:
        """Batches of this epoch, whether done or not: its steps, times the ranks where they come in turns."""
        return self.num_steps * (self._arrangement.num_ranks if self._in_turns else 1)

    def __iter__(self) -> Iterator[list[int]]:
        if self.num_steps in (self.num_steps_done, self._handed_out):
            self._epoch = self._fresh_epoch(self.epoch + 1)
        self._handed_out = self.num_steps_done
        return self._batches(self._epoch)

    def _batches(self, epoch: Epoch) -> Iterator[list[int]]:
        for index in range(epoch.num_earlier + epoch.first_step, epoch.num_steps):
            batches = epoch.step(index).batches
            if epoch is self._epoch:
                self._handed_out = index + 1
            yield from batches if self._in_turns else batches[self._rank : self._rank + 1]

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration one of this epoch. Where it is that of the last one, or of a state that was loaded,
        nothing changes."""
        if _checked("epoch", epoch, MOST_SEED) != self.epoch:
            self._epoch = self._fresh_epoch(epoch)
            self._handed_out = 0

    def step(self, index: int) -> SampledStep:
        """The samples of all ranks in a step of this epoch, with the weights for their losses.

        Args:
            index: counted from the epoch's start. A loop that resumed counts from ``num_steps_done``.

        Raises:
            ConfigurationError: no step has this index, or it was done under other settings.
        """
        return self._epoch.step(index)

    def state_dict(self, num_steps_done: int | None = None) -> dict[str, Any]:
        """What is done, as JSON holds it; the same on every rank.

        Args:
            num_steps_done: steps of this epoch that the loop has finished, where a loader with workers has asked for
                more. By default those whose batches were handed out.

        Raises:
            ConfigurationError: there are not so many.
        """
        done = self._epoch.done_after(self._handed_out if num_steps_done is None else num_steps_done)
        return {
            "schema": SCHEMA,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self.epoch,
            "lengths": digest(self._tokens),
            "done": [[arrangement.to_dict(), num_steps] for arrangement, num_steps in done if num_steps],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was made: with the samples that are left, under this sampler's settings.

        Settings and the number of ranks may be others than then. The seed and the shuffle are the state's. Every rank
        must load the same state.

        Raises:
            ConfigurationError: no such state, or one of other lengths.
        """
        found = read_state(state)
        if found.lengths != digest(self._tokens):
            raise ConfigurationError("the state is of a data set with other lengths, or in another order")
        epoch = self._epoch_from(found.epoch, found.arrangements, seed=found.seed, shuffle=found.shuffle)
        self._epoch, self._seed, self._shuffle = epoch, found.seed, found.shuffle
        self._handed_out = self.num_steps_done

    def _fresh_epoch(self, number: int) -> Epoch:
        return self._epoch_from(number, (), seed=self._seed, shuffle=self._shuffle)

    def _epoch_from(self, number: int, done: Done, *, seed: int, shuffle: bool) -> Epoch:
        return Epoch(self._tokens, self._arrangement, seed=seed, epoch=number, shuffle=shuffle, done=done)

    def _agree(self, group: BalancingGroup, failure: KnapFormerError | None) -> int:
        """Rank 0's seed, where all ranks have the same lengths and settings. Every rank of the group calls it."""
        if failure is not None:
            own: dict[str, Any] = {"error": [type(failure).__name__, str(failure)]}
        else:
            own = {
                "error": None,
                "num_samples": len(self._tokens),
                "lengths": digest(self._tokens),
                "shuffle": self._shuffle,
                **self._arrangement.to_dict(),
                "seed": self._seed,
            }
        said = gather_values(group, own)
        for rank, values in enumerate(said):
            if values["error"] is not None:
                kind, text = values["error"]
                raise getattr(errors, kind)(f"rank {rank}'s sampler: {text}")
        for rank, values in enumerate(said):
            for name, value in values.items():
                if name != "seed" and value != said[0][name]:
                    raise DisagreementError(
                        f"rank {rank}'s sampler has {name} {value!r}, rank 0's has {said[0][name]!r}"
                    )
        return int(said[0]["seed"])


def _control_group(group: dist.ProcessGroup | None) -> BalancingGroup | None:
    """The ranks of ``group``, to agree with; None for a single process. Every rank of the group calls it."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    data = dist.group.WORLD if group is None else group
    assert data is not None
    rank, size = dist.get_rank(data), dist.get_world_size(data)
    return BalancingGroup(None, subgroup(data, [range(size)], "gloo"), rank, size, 0, torch.device("cpu"))


def _tokens_of(lengths: Any) -> IntArray:
    tokens: IntArray = np.stack(list(parse_local_lengths(lengths).values())).sum(axis=0, dtype=np.int64)
    if not len(tokens):
        raise LengthsError("a sampler needs the length of at least one sample, got none")
    return tokens


def _checked(name: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value <= most:
        raise ConfigurationError(f"{name} must be an integer in 0..{most}, got {value!r}")
    return int(value)
