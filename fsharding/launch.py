"""Local ranks: starts a function on n processes through torchrun's own launcher.

In: an importable function, its arguments, a number of ranks. Out: what each rank returned.
A rank that dies ends all others, and its error comes up here. Law: no rank outlives the launcher.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Callable
from typing import Any, cast

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fsharding import errors
from fsharding.errors import RankError, message

__all__ = ["launch_ranks", "under_launcher"]


def under_launcher() -> bool:
    """Whether a launcher such as torchrun has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch_ranks(fn: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Runs `fn(*args)` on local ranks and waits for them.

    Args:
        fn: a module-level function; sent by name.
        ranks: how many processes.
        *args: what can be pickled.

    Returns:
        What each rank returned, in order.

    Raises:
        RankError: a rank raised or died; the text has its number and its error.
        KeyboardInterrupt: the launcher was interrupted; all ranks are gone.
    """
    threads = max(1, (os.cpu_count() or 1) // ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or torch's profiler writes about its starts and stops
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    # The launcher logs a failure line by line; ours says it once.
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        results = elastic_launch(config, fn)(*args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        text = f"lost rank {rank} (exit code {failure.exitcode})."
        raise RankError(message("fsharding", text, [_reason(failure.message)])) from error
    except SignalException as error:
        raise KeyboardInterrupt from error
    return [results[rank] for rank in range(ranks)]


def _reason(recorded: Any) -> str:
    """The error of a rank in its own words, with the stack when it is none of ours."""
    if isinstance(recorded, str):
        try:
            recorded = json.loads(recorded)
        except json.JSONDecodeError:
            return str(recorded)
    stack, inner = "", recorded
    while isinstance(inner, dict) and "message" in inner:
        found = cast(dict[str, Any], inner)
        stack = cast(dict[str, str], found.get("extraInfo", {})).get("py_callstack", stack)
        inner = found["message"]
    text = str(inner)
    return text if text.partition(":")[0] in errors.__all__ else f"{text}\n{stack}".rstrip()
