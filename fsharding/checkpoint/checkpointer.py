"""`Checkpointer`: the checkpoints of a run in one directory, each under its step.

Guarantee: an old checkpoint goes only when a newer one is complete, and nothing but complete ones of ours goes.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fsharding.base.errors import CheckpointError, ConfigError, message
from fsharding.base.public import public
from fsharding.checkpoint.background import SAVE_TIMEOUT, settle
from fsharding.checkpoint.directory import StrPath, latest, real_path, retire
from fsharding.checkpoint.loading import load
from fsharding.checkpoint.positions import Stateful, check_stateful
from fsharding.checkpoint.saving import in_background, plan_save
from fsharding.mesh.meeting import called_by_all
from fsharding.optim.base import GradientTransformation
from fsharding.sharding.layout import Layout
from fsharding.train.state import TrainState

__all__ = ["Checkpointer"]


class Checkpointer:
    """Keeps the newest checkpoints of a run. Its calls are collective.

    Args:
        directory: which holds them; made with the first.
        keep: how many stay; None for all.
        every: `after_step` saves when this divides the step.
        background: return from a save when the state is copied, and write it beside the training.
        data: whose position goes into each checkpoint, and which `load` brings back to it: anything with `state_dict`
            and `load_state_dict`, such as `fs.data.packed` or a `StatefulDataLoader`.
        timeout: of each save; see `save`.

    Raises:
        ConfigError: a number below 1.
        ArgumentError: `data` has no position.

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
        numbers = {"keep": keep, "every": every}
        if rows := [f"{name}={n}" for name, n in numbers.items() if n is not None and n < 1]:
            mend = "Give numbers of at least 1; keep=None keeps all."
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
        """Saves to `directory/<number>`, and then removes what is too old; see `save_async`.

        Args:
            state: the `TrainState` to save.
            extra: as in `save`.
            number: by default the step of the state.

        Raises:
            CheckpointError: this one cannot be saved, or the one before it failed.
            DonatedError: the state was donated.
        """
        settle()
        target = self.directory / str(int(state.step) if number is None else number)
        keep = self.keep
        after = None if keep is None else lambda: retire(self.directory, keep, target)
        job = plan_save(target, state, extra, after, self.data, self.timeout)
        if self.background:
            in_background(job)
        else:
            job.run()

    def after_step(self, state: TrainState, extra: Any = None) -> bool:
        """Saves when it is time; whether it did.

        Raises:
            CheckpointError: as `save`.
            DonatedError: the state was donated.
        """
        due = int(state.step) % self.every == 0
        if due:
            self.save(state, extra)
        return due

    def latest(self) -> Path | None:
        """The newest complete checkpoint, once nothing is being written any more.

        Raises:
            CheckpointError: a save in the background failed.
        """
        settle()
        return latest(self.directory)

    @public
    def load(self, layout: Layout, *, opt: GradientTransformation | None = None) -> TrainState:
        """The newest complete checkpoint in a layout, and `data` at its position; see `load`.

        Raises:
            CheckpointError: there is none, or it cannot be loaded.
        """
        newest = self.latest()
        if newest is None:
            raise CheckpointError(message(f"finds no complete checkpoint in {self.directory}."))
        return load(newest, layout, opt=opt, data=self.data)

    def wait(self) -> None:
        """Returns when nothing is being written any more.

        Raises:
            CheckpointError: a save in the background failed.
        """
        settle()

    def close(self) -> None:
        """The same as `wait`."""
        settle()
