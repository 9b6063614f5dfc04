"""`generate`: new tokens after prompts, from parameters under any strategy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsharding import ops
from fsharding.base import _compat, tree
from fsharding.base.errors import (
    ArgumentError,
    ConfigError,
    DataError,
    NonFiniteError,
    TransformError,
    TreeError,
    message,
)
from fsharding.base.public import check_function, kind_of, public, refuse, refuse_compiled
from fsharding.base.tree import Tree
from fsharding.formats.precision import FP32, Precision, check_precision
from fsharding.mesh.consistency import compare, refuse_differences
from fsharding.mesh.device_mesh import abstract, axis_group, axis_size, set_mesh
from fsharding.mesh.failures import naming_lost
from fsharding.models.cache import at_each, store
from fsharding.models.decoder import DecoderConfig, decoder
from fsharding.models.model import Decode, Model, unlike_shapes
from fsharding.ops.embedding import checked_ids
from fsharding.sharding import random
from fsharding.sharding.mesh_view import slice_of
from fsharding.sharding.named_sharding import hides_owners, to_local, typeof
from fsharding.transforms.gather_context import evaluating
from fsharding.transforms.gather_unit import gather_unit
from fsharding.transforms.scan import unstack_units

__all__ = ["generate"]

_NAME = "fs.models.generate"


@public
@_compat.never_inlined
def generate(
    model: Any,
    params: Any,
    prompts: Any,
    max_new_tokens: int,
    *,
    key: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | Sequence[int] | None = None,
    context: int | None = None,
    precision: Precision | None = None,
    stream: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Generate tokens after prompts. Collective: every rank calls it.

    Ranks of `tp` pass the same prompts; ranks of data axes may pass different ones. With the same key and prompts they
    get the same tokens; pass `key=fs.random.for_rank(key, mesh)` for different samples.

    Args:
        model: A `DecoderConfig`, its `decoder`, or a function `(params, tokens) -> logits` from int64[B, T] to
            [B, T, V], or to an object with `.logits`, such as a functionalized Hugging Face model, which runs in eval
            mode. Logits of a token must not depend on later tokens.
        params: Parameters, sharded or unsharded, or a `TrainState`. A function gets full tensors.
        prompts: Token ids, int64[B, T]; or a list of prompts of any lengths, each a list or a 1-d tensor.
        max_new_tokens: N, the number of new tokens per prompt.
        key: Random key (int64[2]). None selects the most likely token each time.
        temperature: Divisor of the logits before the softmax; 0 selects the most likely token.
        top_k: Number of most likely tokens to sample from. Default: all.
        top_p: Total probability of the most likely tokens to sample from, after `top_k` (nucleus, arXiv:1904.09751).
        eos: Token id, or several, after which a row ends.
        context: Most tokens that a function accepts; it receives the last ones. Not for decoders.
        precision: Compute dtypes. Default: the state's precision; for plain parameters, their dtype.
        stream: Callback that receives the new token of every row, int64[B], after each step.

    Returns:
        The new tokens, int64[B, N], without the prompts. After a row's end, the (first) `eos` is repeated.

    Raises:
        ArgumentError: The model isn't a model or a function, or the prompts aren't token ids.
        ConfigError: A number is out of range, sampling options lack a key, the model can't decode, the mesh has `pp`,
            or ranks of `tp` or `ep` pass different prompts or settings.
        TreeError: The parameters don't fit the model.
        DataError: A prompt is empty, or a token is outside of the vocabulary.
        TransformError: The function doesn't return logits [B, T, V].
        NonFiniteError: Logits are NaN.
        RankError: A different rank failed or exited.

    Example:
        >>> config = fs.models.DecoderConfig(vocab_size=16, dim=8, layers=2, heads=2, kv_heads=1, intermediate_size=12)
        >>> model = fs.models.decoder(config)
        >>> state, _ = fs.setup(model, None, fs.adamw(1e-3), fs.random.key(0))
        >>> fs.models.generate(config, state, [[3, 1, 4], [1, 5]], 4).shape
        torch.Size([2, 4])
        >>> fs.models.generate(config, state, [[3, 1]], 9, key=fs.random.key(1), temperature=0.8, top_k=5).shape
        torch.Size([1, 9])
    """
    refuse_compiled("Compile what it calls: fs.models.generate(torch.compile(apply), ...).")
    sampling = _Sampling(key, temperature, top_k, top_p)
    ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    _check_numbers(max_new_tokens, context, sampling, ends)
    model = decoder(model) if isinstance(model, DecoderConfig) else model
    decode = _decode_of(model, context)
    values, dtypes = (params.params, params.layout.precision) if hasattr(params, "opt_state") else (params, FP32)
    dtypes = dtypes if precision is None else precision
    check_precision(dtypes)
    mesh = _mesh_of(values)
    if decode is not None:
        _check_parameters(model, values)
    rows = _rows(prompts, decode.vocab if decode is not None else None)
    with evaluating(), torch.no_grad(), naming_lost(_NAME, mesh):
        if mesh is not None:
            _agree(mesh, rows, max_new_tokens, sampling, ends)
        with nullcontext() if mesh is None else set_mesh(_without_cp(mesh)):
            predictor = _predictor(model, decode, values, dtypes.activation_dtype, context)
            return _loop(predictor, rows, max_new_tokens, sampling, ends, stream)


# ------------------------------------------------------------------------------------------------------------ the loop
def _loop(
    predictor: _Cached | _Uncached,
    prompts: Sequence[Tensor],
    count: int,
    sampling: _Sampling,
    ends: Sequence[int],
    stream: Callable[[Tensor], object] | None,
) -> Tensor:
    """Process the prompts at once, padded at their ends, then one token per step."""
    tokens_BT = torch.nn.utils.rnn.pad_sequence([*prompts], batch_first=True)
    rows, longest = tokens_BT.shape
    cache = predictor.begin(rows, longest + count)
    device = tree.leaves(cache)[0].device  # the compute device; parameters may be stored in host memory
    tokens_BT, lengths_B = tokens_BT.to(device), torch.tensor([x.numel() for x in prompts]).to(device)
    draws_BN = sampling.draws(rows, count, device)
    ends_K = torch.tensor(ends, dtype=torch.int64, device=device)
    done_B = torch.zeros(rows, dtype=torch.bool, device=device)
    positions_BT = torch.arange(longest, device=device).expand(rows, -1)
    logits_BV = predictor.logits(cache, tokens_BT, positions_BT, lengths_B - 1, longest)
    if logits_BV.isnan().any():
        mend = "Load a checkpoint of an earlier step, whose parameters are finite."
        raise NonFiniteError(message("got logits that are NaN: parameters are not finite.", mend=mend))
    new_BN = torch.full((rows, count), ends[0] if ends else 0, dtype=torch.int64, device=device)
    for n in range(count):
        next_B = sampling.choose(logits_BV, draws_BN[:, n]).where(~done_B, new_BN[:, n])
        new_BN[:, n] = next_B
        if stream is not None:
            stream(next_B.clone())
        done_B |= torch.isin(next_B, ends_K)
        # Ranks of ep exchange tokens in each step, so none may stop before the others.
        if n + 1 == count or (ends and _all_done(done_B)):
            break
        positions_B1 = (lengths_B + n)[:, None]
        logits_BV = predictor.logits(cache, next_B[:, None], positions_B1, torch.zeros_like(lengths_B), longest + n + 1)
    return new_BN


def _all_done(done_B: Tensor) -> bool:
    """Return whether all rows have ended, also on the other ranks of `ep`."""
    left = (~done_B).sum().float()
    return not (ops.psum(left, "ep") if axis_size("ep") > 1 else left).item()


# --------------------------------------------------------------------------------------------------------- the next one
class _Sampling(NamedTuple):
    """Sampling options of `generate`."""

    key: Tensor | None
    temperature: float
    top_k: int | None
    top_p: float | None

    def draws(self, rows: int, count: int, device: torch.device) -> Tensor:
        """Draw uniform numbers in [0, 1): float64[B, N]."""
        # Each row has its own key, so its numbers don't depend on B or N.
        if self.key is None:
            return torch.zeros(rows, count, dtype=torch.float64, device=device)
        each = [random.uniform(random.fold_in(self.key, row), (count,)).tensor() for row in range(rows)]
        return torch.stack(each).to(device=device, dtype=torch.float64)

    def choose(self, logits_BV: Tensor, draw_B: Tensor) -> Tensor:
        """Choose the next token of each row, where the cumulative probability exceeds the draw: int64[B]."""
        if self.key is None or self.temperature == 0:
            return logits_BV.argmax(-1)
        p_BV = self.probabilities(logits_BV)
        below_BV = p_BV.cumsum(-1)
        # The sum is 1 up to rounding; times the sum, a draw is always below it.
        return (below_BV <= draw_B[:, None] * below_BV[:, -1:]).sum(-1)

    def probabilities(self, logits_BV: Tensor) -> Tensor:
        """Compute the sampling probabilities, 0 for tokens that `top_k` or `top_p` exclude: float64[B, V]."""
        p_BV = (logits_BV.double() / self.temperature).softmax(-1)
        if self.top_k is None and self.top_p is None:
            return p_BV
        sorted_BV, order_BV = p_BV.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            sorted_BV[:, self.top_k :] = 0
        if self.top_p is not None:
            before_BV = sorted_BV.cumsum(-1) - sorted_BV
            sorted_BV = sorted_BV.where(before_BV < self.top_p * sorted_BV.sum(-1, keepdim=True), 0)
        kept_BV = torch.zeros_like(p_BV).scatter_(-1, order_BV, sorted_BV)
        return kept_BV / kept_BV.sum(-1, keepdim=True)


class _Unit(NamedTuple):
    """A block of a decoder with its gathered parameters."""

    run: Callable[[Tree, Any, Tree], Any]
    cache: Callable[[Tree, int, int], Tree]
    params: Tree


@dataclass(frozen=True)
class _Cached:
    """A decoder with parameters gathered over the data axes; its cache is a list with one cache per block."""

    decode: Decode
    embed: Tree
    blocks: list[_Unit]
    head: Tree

    def begin(self, rows: int, length: int) -> Tree:
        """Allocate an empty cache for `length` tokens per row."""
        return [unit.cache(unit.params, rows, length) for unit in self.blocks]

    def logits(self, cache: Tree, tokens_BT: Tensor, positions_BT: Tensor, last_B: Tensor, used: int) -> Tensor:
        """Add new tokens to the cache, in place, and compute the logits of the next one of each row: [B, V]."""
        x = self.decode.embed(self.embed, {"tokens": tokens_BT, "positions": positions_BT})
        for unit, kept in zip(self.blocks, cache, strict=True):
            x = unit.run(unit.params, x, tree.map(lambda slots: slots[:, :used], kept))
        return self.decode.logits(self.head, x, last_B)


@dataclass(frozen=True)
class _Uncached:
    """A function that recomputes all tokens; its cache is the tokens themselves, [B, S]."""

    fn: Callable[[Tree, Tensor], Any]
    params: Tree
    context: int | None

    def begin(self, rows: int, length: int) -> Tree:
        device = next((x.device for x in tree.leaves(self.params)), None)
        return torch.zeros(rows, length, dtype=torch.int64, device=device)

    def logits(self, cache: Tree, tokens_BT: Tensor, positions_BT: Tensor, last_B: Tensor, used: int) -> Tensor:
        store(cache[:, :used], tokens_BT, positions_BT)
        # Rows end at different positions: each gets the window of `width` tokens that ends with its last one.
        width = min(used, self.context or used)
        end_B = positions_BT.gather(1, last_B[:, None])[:, 0] + 1
        first_B = (end_B - width).clamp(min=0)
        window_BT = cache.gather(1, first_B[:, None] + torch.arange(width, device=cache.device))
        result = self.fn(self.params, window_BT)
        logits = getattr(result, "logits", result)
        fits = isinstance(logits, Tensor) and logits.is_floating_point() and logits.ndim == 3
        if not fits or logits.shape[:2] != window_BT.shape:
            name = getattr(self.fn, "__name__", type(self.fn).__name__)
            row = f"{name} returned {kind_of(logits)} for tokens {list(window_BT.shape)}"
            mend = "Return the logits of every token, [B, T, V], or an object with .logits."
            raise TransformError(message("needs a function that returns logits.", [row], mend))
        return at_each(logits, end_B - 1 - first_B)[:, 0]


# ---------------------------------------------------------------------------------------------------------- parameters
def _predictor(
    model: Any, decode: Decode | None, params: Tree, dtype: torch.dtype | None, context: int | None
) -> _Cached | _Uncached:
    """Gather each unit once: generation keeps the gathered parameters for all tokens."""
    if decode is None:
        return _Uncached(model, _gathered(params, dtype), context)
    gather = functools.partial(gather_unit, dtype=dtype)
    embed = gather(params["embed"])
    of_each: list[Any] = [decode.block, decode.prepare, decode.cache, params["blocks"]]
    stacks = [of_each] if callable(decode.block) else [[x[name] for x in of_each] for name in decode.block]
    blocks: list[_Unit] = []
    for run, prepare, cache, stack in stacks:
        blocks += [_Unit(run, cache, prepare(gather(unit))) for unit in unstack_units(stack)]
    # A tied head uses the embedding's gathered tensor, so the table is gathered and stored once.
    tied = {name: tree.at({"embed": embed}, path) for name, path in model.tied}
    return _Cached(decode, embed, blocks, {**gather(params["head"]), **tied})


def _gathered(params: Tree, dtype: torch.dtype | None) -> Tree:
    """Gather any parameters, one top-level entry at a time to bound the buffers."""
    if isinstance(params, Mapping):
        return {name: gather_unit(part, dtype=dtype) for name, part in cast("Mapping[str, Tree]", params).items()}
    return gather_unit(params, dtype=dtype)


def _mesh_of(params: Tree) -> DeviceMesh | None:
    """Return the mesh of the parameters; raise if it has pipeline stages."""
    meshes = (to_local(x).sharding.mesh for x in tree.leaves(params) if isinstance(x, DTensor))
    mesh = cast("DeviceMesh | None", next(meshes, None))
    if mesh is not None and (stages := abstract(mesh).axis_size("pp")) > 1:
        mend = "Reshard them first: fs.reshard(state, fs.plan_layout(model, fs.make_mesh(dp=-1)))."
        raise ConfigError(message(f"got parameters on a mesh with pp={stages}.", mend=mend))
    return mesh


def _without_cp(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh without `cp`, each of whose ranks generates full sequences."""
    names = tuple(name for name in abstract(mesh).names if name != "cp")
    return mesh if abstract(mesh).axis_size("cp") == 1 else slice_of(mesh, names)


# -------------------------------------------------------------------------------------------------------------- checks
def _decode_of(model: Any, context: int | None) -> Decode | None:
    """Return the decode functions of a model; None for a function."""
    if not hasattr(model, "block"):
        check_function("a decoder, or a function (params, tokens) -> logits", model, 2)
        return None
    if getattr(model, "decode", None) is None:
        mend = "Pass a function (params, tokens) -> logits instead, such as fs.functionalize(module)."
        raise ConfigError(message("got a Model that cannot decode: it computes losses, not logits.", mend=mend))
    if context is not None:
        mend = "Remove context=: it limits the tokens that a function receives."
        raise ConfigError(message(f"got context={context} with a model that keeps all tokens.", mend=mend))
    return model.decode


def _check_numbers(count: int, context: int | None, sampling: _Sampling, ends: Sequence[int]) -> None:
    optional = {"context": context, "top_k": sampling.top_k}
    least = {"max_new_tokens": count} | {name: x for name, x in optional.items() if x is not None}
    wrong = [f"{name}={x!r}: an int, at least 1" for name, x in least.items() if type(x) is not int or x < 1]
    temperature, top_p = sampling.temperature, sampling.top_p
    wrong += [] if 0 <= temperature < math.inf else [f"temperature={temperature}: at least 0, and finite"]
    wrong += [] if top_p is None or 0 < top_p <= 1 else [f"top_p={top_p}: above 0, at most 1"]
    wrong += [f"eos={end!r}: a token id" for end in ends if not isinstance(end, int) or end < 0]
    if wrong:
        raise ConfigError(message("got numbers out of range.", wrong, "Pass numbers within these limits."))
    chosen = {"temperature": None if temperature in (0, 1) else temperature, "top_k": sampling.top_k, "top_p": top_p}
    if sampling.key is None and (given := [f"{name}={x}" for name, x in chosen.items() if x is not None]):
        mend = "Pass key=fs.random.key(0). Without a key, the most likely token is selected."
        raise ConfigError(message(f"got {', '.join(given)} but no key to sample with.", mend=mend))


def _check_parameters(model: Model, params: Tree) -> None:
    """Raise if the paths or shapes of parameters aren't the model's."""
    wanted = model.init(random.key(0))
    tree.match(wanted, params, ("the model", "params"))
    # A rank's DTensor of a fused leaf over tp is its slice, which doesn't show the full shape.
    plain = {k: x for k, x in tree.named_leaves(params).items() if not (isinstance(x, DTensor) and hides_owners(x))}
    if rows := unlike_shapes(wanted, {path: typeof(x).shape for path, x in plain.items()}):
        mend = "Pass the config that they were trained with."
        raise TreeError(message("got parameters of other shapes than the model's.", rows, mend))


def _rows(prompts: Any, vocab: int | None) -> list[Tensor]:
    """Convert the prompts to tensors on the CPU, each int64[T]."""
    mend = "Pass int64[B, T], or a list of prompts: [[3, 1, 4], [1, 5]]."
    if isinstance(prompts, str) or (isinstance(prompts, Sequence) and any(isinstance(x, str) for x in prompts)):
        mend = "Tokenize it first; for a byte-level model, pass [[*text.encode()]]."
        raise ArgumentError(message("takes token ids, got text.", mend=mend))
    if not isinstance(prompts, Tensor | Sequence) or isinstance(prompts, DTensor):
        raise refuse("prompts of token ids", prompts, mend)
    given: list[Any] = [*cast("Sequence[Any]", prompts)]
    if any(not isinstance(x, Tensor | Sequence) or (isinstance(x, Tensor) and x.ndim == 0) for x in given):
        raise refuse("a list of prompts", prompts, f"{mend} For a single prompt, pass [prompt].")
    rows = [torch.as_tensor(x, device="cpu") for x in given]
    if not rows or any(x.ndim != 1 or not x.numel() for x in rows):
        shapes = [f"prompt {i} has {list(x.shape)}" for i, x in enumerate(rows) if x.ndim != 1 or not x.numel()]
        mend = "Pass at least one token per prompt, such as the one that begins a text."
        raise DataError(message("needs non-empty prompts of one dim.", shapes or ["no prompts"], mend))
    most = 1 << 62 if vocab is None else vocab
    return [checked_ids("prompts", x, most) for x in rows]


def _agree(mesh: DeviceMesh, rows: Sequence[Tensor], count: int, sampling: _Sampling, ends: Sequence[int]) -> None:
    """Raise if ranks of `tp` or `ep` pass different arguments. Collective over both."""
    # Ranks of ep exchange tokens, so they run the same number of steps, but may have different prompts.
    settings = {"max_new_tokens": str(count), "eos": "none" if not ends else str(list(ends))}
    key = None if sampling.key is None else sampling.key.tolist()
    own = {"prompts": str([x.tolist() for x in rows]), "key": str(key)}
    own |= {name: str(getattr(sampling, name)) for name in ("temperature", "top_k", "top_p")}
    for axis, facts in (("tp", settings | own), ("ep", settings)):
        group = axis_group(mesh, (axis,) if abstract(mesh).axis_size(axis) > 1 else ())
        if group.size > 1:
            refuse_differences(compare(facts, group, mesh.device_type))
