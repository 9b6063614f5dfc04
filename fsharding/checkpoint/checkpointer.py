"""`Checkpointer`: the checkpoints of a run in one directory, named by their steps.

Guarantee: an old checkpoint is removed only once a newer one is complete; nothing else is ever removed.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fsharding.base.errors import CheckpointError, ConfigError, message
from fsharding.base.public import public
from fsharding.checkpoint.background import SAVE_TIMEOUT, settle
from fsharding.checkpoint.collective_call import step_of
from fsharding.checkpoint.directory import StrPath, latest, real_path, retire
from fsharding.checkpoint.loading import load
from fsharding.checkpoint.positions import Stateful, check_stateful
from fsharding.checkpoint.saving import in_background, plan_save
from fsharding.mesh.device_mesh import abstract, world_size
from fsharding.mesh.meeting import called_by_all
from fsharding.optim.base import GradientTransformation
from fsharding.sharding.layout import Layout
from fsharding.train.state import TrainState

__all__ = ["Checkpointer"]


class Checkpointer:
    """Saves checkpoints of a run and keeps the newest. Its calls are collective.

    Args:
        directory: Parent directory of the checkpoints; created by the first save.
        keep: Number of checkpoints to keep; None keeps all.
        every: Interval in steps at which `after_step` saves.
        background: Whether to write in the background, as `save_async` does.
        data: Data whose position each checkpoint stores and `load` restores, as in `save`.
        timeout: Time limit of each save, as in `save`.

    Raises:
        ConfigError: a number below 1.
        ArgumentError: `data` without `state_dict` and `load_state_dict`.

    Example:
        >>> opt, layout = fs.sgd(0.1), fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(lambda key: {"w": torch.ones(4)}, opt, fs.random.key(0), layout)
        >>> step = fs.make_train_step(lambda params, x: (x @ fs.gather_unit(params)["w"]).sum(), opt)
        >>> with fs.checkpoint.Checkpointer("run", keep=2, every=2) as checkpointer:
        ...     for x in torch.ones(5, 3, 4):
        ...         state, metrics = step(state, x)
        ...         saved = checkpointer.after_step(state)
        ...     int(checkpointer.load(layout, opt=opt).step)
        4
    """

    @public
    def __init__(
        self,
        directory: StrPath,
        *,
        keep: int | None = 3,
        every: int = 1,
        background: bool = True,
        data: Stateful | None = None,
        timeout: timedelta = SAVE_TIMEOUT,
    ) -> None:
        if rows := [f"{name}={n}" for name, n in (("keep", keep), ("every", every)) if n is not None and n < 1]:
            mend = "Pass numbers of at least 1; keep=None keeps all."
            raise ConfigError(message("cannot keep fewer than one.", rows, mend))
        self.directory = real_path(directory)
        if data is not None:
            check_stateful(data)
        self.keep = keep
        self.every = every
        self.background = background
        self.data = data
        self.timeout = timeout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(str(failed))

    @public
    @called_by_all
    def save(self, state: TrainState, extra: Any = None, *, number: int | None = None) -> None:
        """Save to `directory/<number>`, then remove the oldest checkpoints beyond `keep`.

        Args:
            state: State to save.
            extra: JSON value to store, as in `fs.checkpoint.save`.
            number: Name of the checkpoint; by default the state's step.

        Raises:
            CheckpointError: a state that can't be saved, or an earlier background save that failed.
            DonatedError: a donated state.
        """
        settle()
        target = self.directory / str(step_of(state) if number is None else number)
        keep = self.keep
        after = None if keep is None else lambda: retire(self.directory, keep, target)
        job = plan_save(target, state, extra, after, self.data, self.timeout)
        if self.background:
            in_background(job)
        else:
            job.run()

    def after_step(self, state: TrainState, extra: Any = None) -> bool:
        """Save if `every` divides the step; return whether it did. Takes `state` and `extra` as `save` does.

        Raises:
            CheckpointError: as in `save`.
            DonatedError: a donated state.
        """
        # Ranks outside a smaller mesh have an outdated step.
        whole = abstract(state.layout.mesh).size == world_size()
        if due := (int(state.step) if whole else step_of(state)) % self.every == 0:
            self.save(state, extra)
        return due

    def latest(self) -> Path | None:
        """Wait for the background save, and find the newest complete checkpoint, if any.

        Raises:
            CheckpointError: a background save failed.
        """
        settle()
        return latest(self.directory)

    @public
    def load(self, layout: Layout, *, opt: GradientTransformation | None = None) -> TrainState:
        """Load the newest complete checkpoint, and restore the position of `data`; see `fs.checkpoint.load`.

        Args:
            layout: Layout of the state.
            opt: Optimizer of the state.

        Raises:
            CheckpointError: there is no complete checkpoint, or it can't be loaded.
        """
        if (newest := self.latest()) is None:
            mend = "Start with fs.init_state, or pass the directory of a run that has saved."
            raise CheckpointError(message(f"finds no complete checkpoint in {self.directory}.", mend=mend))
        return load(newest, layout, opt=opt, data=self.data)

    def wait(self) -> None:
        """Wait for the background save.

        Raises:
            CheckpointError: the save failed.
        """
        settle()

    def close(self) -> None:
        """Wait for the background save, as `wait` does."""
        settle()
