"""Whether a step can be captured as one graph, asked on any device.

Guarantee: what passes on a CPU issues the same operations in every call, and its host reads nothing.
"""

from __future__ import annotations

from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.train.capture import refuse_host_work
from fsharding.train.state import TrainState
from fsharding.train.step import TrainStep

__all__ = ["assert_capturable"]


@public
def assert_capturable(step: TrainStep, state: TrainState, batch: Tree) -> None:
    """Refuses a step that `fs.capture` would refuse, without a GPU. Collective.

    It makes three steps on a copy of the state: the first as any, then two whose operations on which shapes and numbers
    are compared, and in which the host must not read a tensor.

    Args:
        step: of `make_train_step` with `check="async"`.
        state: a state for it, which is left as it is.
        batch: this rank's part.

    Raises:
        TransformError: the host reads the device, takes a tensor from the host to it, or the operations differ from
            call to call; with the lines.
        ConfigError: the step was made with `check="sync"`.
        ArgumentError: no step or no state.

    Example:
        >>> def loss(params, batch):
        ...     error = (batch["x"] @ fs.gather_unit(params)["w"]).square().sum()
        ...     return error * 2 if error.item() > 1 else error
        >>> state, step = fs.setup({"w": torch.ones(4)}, loss, fs.sgd(0.1), fs.random.key(0), check="async")
        >>> try:
        ...     fs.testing.assert_capturable(step, state, {"x": torch.ones(3, 4)})
        ... except TypeError as error:
        ...     print(str(error).splitlines()[0])
        fs.testing.assert_capturable cannot capture a step in which the host reads the device.
    """
    refuse_host_work(step, state, batch)
