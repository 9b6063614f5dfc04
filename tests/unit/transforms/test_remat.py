"""`remat` under torch.func: what it closes over, what it returns, how often it computes, and what we ask torch for."""

import dataclasses
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.func import grad, jvp, vjp, vmap
from torch.utils import _pytree as torch_pytree

import fsharding as fs
from fsharding import ops
from fsharding.base import _functorch
from fsharding.base.errors import TransformError
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.testing import assert_bitwise_equal, assert_trees_close
from tests.helpers import refusal

W, X = torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(0, 2, 8).view(2, 4)


def plain(fn):
    return fn


TRANSFORMS = {
    "grad": lambda f: grad(f)(W),
    "jvp": lambda f: jvp(f, (W,), (W.cos(),)),
    "vmap": lambda f: vmap(f)(torch.stack([W, W.cos()])),
    "vmap of grad": lambda f: vmap(grad(f))(torch.stack([W, W.cos()])),
    "grad of vmap": lambda f: grad(lambda w: vmap(lambda s: f(w * s))(torch.arange(3.0)).sum())(W),
    "jvp of grad": lambda f: jvp(grad(f), (W,), (W.cos(),))[1],
    "grad of grad": lambda f: grad(lambda w: (grad(f)(w) * W.cos()).sum())(W),
    "grad of jvp": lambda f: grad(lambda w: jvp(f, (w,), (W.cos(),))[1])(W),
    "third": lambda f: grad(lambda w: jvp(grad(f), (w,), (W.cos(),))[1].square().sum())(W),
    "autograd inside": lambda f: grad(lambda w: torch.autograd.grad(f(w), w, create_graph=True)[0].square().sum())(W),
}


def closing(remat):
    """A remat that closes over what is differentiated, around one that does, too."""

    def f(w):
        inner = remat(lambda y: torch.tanh(y @ w) * w.sum())
        return remat(lambda x: inner(x + w[:2].sum()).square().sum() + (x @ w).sin().sum())(X)

    return f


def handing_on(remat):
    """What is closed over goes to a Function of ours first; integers and unused results come and go."""

    def f(w):
        def body(x, number, unused):
            shared = ops.psum(w, "dp")
            return {"x": torch.sin(x @ shared) * number, "number": number, "as it is": x, "unused": unused.exp()}

        out = remat(body)(X, torch.tensor(3), w)
        return out["x"].square().sum() + out["as it is"].sum()

    return f


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("make", [closing, handing_on])
def test_no_derivative_depends_on_it(name, make):
    with fs.set_mesh(AbstractMesh(("dp",), (1,))):
        found, want = (TRANSFORMS[name](make(remat)) for remat in (fs.remat, plain))
    assert_trees_close(found, want, rtol=1e-5, atol=1e-4)


def test_it_computes_once_forward_and_once_back():
    calls = []

    def block(p, x):
        calls.append(1)
        return torch.tanh(x @ p)

    stack = torch.stack([torch.eye(4), torch.ones(4, 4)])
    policy = fs.policies.nothing_saveable
    grad(lambda s: fs.scan_units(block, s, X, policy=policy).sum())(stack)
    assert len(calls) == 4
    calls.clear()
    # What it closes over is found out by one more call, not by one a layer.
    grad(lambda s: fs.scan_units(lambda p, x: block(p, x) * s.sum(), s, X, policy=policy).sum())(stack)
    assert len(calls) == 5


def test_a_pullback_finds_the_mesh_of_its_forward():
    def f(w):
        return fs.remat(lambda w: ops.psum(w.sin(), "dp").sum())(w)

    with fs.set_mesh(AbstractMesh(("dp",), (1,))):
        _, pull = vjp(f, W)
    assert_bitwise_equal(pull(torch.ones(()))[0], W.cos())


# ------------------------------------------------------------------------------------------------------------ canaries
def test_what_is_inside_a_wrapper():
    seen = {}

    def f(x):
        seen["dims"], seen["inside"] = _functorch.batch_dims(x), _functorch.innermost(x)
        return x.sum()

    vmap(grad(f), in_dims=1)(W)
    assert seen["dims"] == [1] and seen["inside"].shape == W.shape
    vmap(vmap(f, in_dims=1))(torch.zeros(2, 3, 4))
    assert seen["dims"] == [0, 1]
    assert _functorch.innermost(W) is W and _functorch.innermost(3) == 3 and _functorch.batch_dims(W) == []


class Call(torch.autograd.Function):
    """The identity, which calls something where torch has taken the transforms off its arguments."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, fn):
        fn()
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        return None

    @staticmethod
    def backward(ctx, g):
        return g, None

    @staticmethod
    def jvp(ctx, t, _):
        return t


def test_tensors_of_other_transforms_are_foreign():
    seen = []

    def f(x):
        assert not _functorch.is_foreign(x) and _functorch.shown(x) is x
        return Call.apply(x, lambda: seen.append(_functorch.is_foreign(x))).sum()

    grad(f)(W), jvp(f, (W,), (W,)), jvp(grad(f), (W,), (W,)), vmap(grad(f))(W), grad(lambda w: vmap(f)(w).sum())(W)
    assert seen == [True] * 5
    assert not _functorch.is_foreign(W) and _functorch.shown(W) is W


def test_which_transform_runs():
    seen = []

    def f(x):
        seen.append(_functorch.in_jvp())
        return x.sum()

    f(W), grad(f)(W), jvp(f, (W,), (W,)), vmap(f)(W), jvp(grad(f), (W,), (W,))
    assert seen == [False, False, True, False, True]


class Node:
    def __init__(self, value):
        self.value = value


def make_node(children, _):
    JACFWD_MAKES.append(_functorch.is_called_by_jacfwd())
    return Node(*children)


JACFWD_MAKES: list[bool] = []
torch_pytree.register_pytree_node(Node, lambda node: ([node.value], None), make_node)


@pytest.mark.parametrize("name", ["jacfwd", "hessian", "jacrev", "grad", "jvp"])
def test_trees_that_jacfwd_makes_are_noticed(name):
    JACFWD_MAKES.clear()
    args = [lambda node: node.value.sin().sum(), *([(Node(W),), (Node(W),)] if name == "jvp" else [])]
    made = getattr(torch.func, name)(*args)
    _ = made if name == "jvp" else made(Node(W))
    assert any(JACFWD_MAKES) == (name in ("jacfwd", "hessian"))
    assert JACFWD_MAKES and not all(JACFWD_MAKES)


def test_linearize_is_noticed():
    seen = []

    def f(x):
        seen.append((_functorch.linearizing(), _functorch.in_functorch()))
        return x.sum()

    f(W), torch.func.linearize(f, W), jvp(f, (W,), (W,)), vmap(f)(W)
    assert seen == [(False, False), (False, False), (True, True), (False, True), (False, True)]


def test_a_linear_map_calls_what_was_recorded_while_it_was_traced():
    calls = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(x):
            def run(x):
                calls.append(x)
                return 2 * torch.from_numpy(x.numpy())  # numpy, which no trace sees; its product warns of a NaN

            return _functorch.recorded(x, run, run)

        @staticmethod
        def setup_context(ctx, inputs, output):
            return None

        @staticmethod
        def jvp(ctx, t):
            return Double.apply(t)

    push = torch.func.linearize(lambda x: Double.apply(x) * x, W)[1]
    calls.clear()
    for tangent in (W, W + 1):
        torch.testing.assert_close(push(tangent), 4 * W * tangent)
    assert len(calls) >= 2


def test_only_grad_itself_needs_no_graph_of_its_backward():
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            (kept,) = _functorch.without_own_graph([x])
            seen.append((x.requires_grad, kept.requires_grad))
            return g * x

    def f(x):
        return Look.apply(x).sum()

    grad(f)(W)
    grad(lambda x: torch.autograd.grad(f(x), x, create_graph=True)[0].sum())(W)
    leaf = W.clone().requires_grad_()
    torch.autograd.grad(f(leaf), leaf)
    # The last step of the second line goes through the node again, for the graph of the first derivative.
    assert seen[:2] == [(True, False), (True, True)] and seen[-1] == (True, True)


@dataclass(slots=True)
class Slot:
    value: object = None


def put(kept, aux):
    """Write into a container or an object in its own way."""
    match kept:
        case list() | deque():
            kept.append(aux)
        case dict():
            kept["aux"] = aux
        case set():
            kept.add(aux)
        case tuple():
            put(kept[-1], aux)
        case _:
            kept.value = aux


WRITES = {
    "kept[1] is new": lambda: [torch.ones(1)],
    "kept['aux'] was replaced": lambda: {"aux": torch.ones(1)},
    "kept['aux'] is new": dict,
    "kept{...} is new": set,
    "kept[1][0] is new": lambda: (1, deque()),
    "kept.value was replaced": lambda: SimpleNamespace(value=torch.ones(1)),
    "kept.value is new": Slot,
    "kept.inner['aux'] is new": lambda: SimpleNamespace(inner={}),
}


def writing(x, kept):
    put(getattr(kept, "inner", kept), x.square().sum())
    return torch.sin(x)


@pytest.mark.parametrize("words", WRITES)
@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable", "offload_inputs"])
def test_what_a_function_writes_into_its_arguments_is_refused(words, policy):
    block = fs.remat(writing, policy=fs.policies.POLICIES[policy])
    kept = WRITES[words]
    for run in (lambda: block(X.clone().requires_grad_(), kept()), lambda: grad(lambda x: block(x, kept()).sum())(X)):
        said = refusal(run, kind=TransformError)
        assert "recomputes writing in backward" in said and f"  {words}" in said and "Return the value" in said


def test_a_tensor_changed_in_place_is_refused_and_an_argument_that_is_read_is_not():
    def doubling(x):
        return torch.sin(x.mul_(2))

    for run in (
        lambda x: torch.autograd.grad(fs.remat(doubling)(x * 1).sum(), x),
        grad(lambda x: fs.remat(doubling)(x * 1).sum()),
    ):
        assert "x was changed in place: a tensor float32[2, 4]" in refusal(
            run, X.clone().requires_grad_(), kind=TransformError
        )

    def reading(x, options):
        return torch.sin(x * options["scale"].value * len(options["names"]))

    options = {"scale": SimpleNamespace(value=torch.full((), 2.0)), "names": {"a", "b"}, "rest": [1, None]}
    options["scale"].options = options
    assert_bitwise_equal(
        grad(lambda x: fs.remat(reading)(x, options).sum())(X), grad(lambda x: torch.sin(x * 4).sum())(X)
    )


def test_what_a_quantized_weight_is_gathered_with_is_no_argument():
    """A gather that another thread has started ahead must not be taken for what the block writes."""
    ahead = {}
    weight = fs.formats.quantize(torch.ones(4, 64), fs.formats.MXFP8)
    weight = dataclasses.replace(weight, columnwise=SimpleNamespace(ahead=ahead))

    def block(x, weight):
        ahead[len(ahead)] = torch.ones(1)
        return torch.sin(x)

    assert_bitwise_equal(fs.remat(block)(X, weight), torch.sin(X))

    def writing_codes(x, weight):
        weight.values.zero_()
        return torch.sin(x)

    assert "weight.values was changed in place" in refusal(fs.remat(writing_codes), X, weight, kind=TransformError)


def keeping(params, carry):
    x, kept = carry
    x = torch.tanh(x @ params["w"])
    kept.append(100 * x.square().sum())
    return x, kept


@pytest.mark.parametrize("policy", fs.policies.POLICIES)
def test_a_list_in_a_carry_is_kept_or_refused(policy):
    stack = {"w": torch.stack([W[:3], W[1:].cos()])}
    layout = fs.plan_layout(stack, fs.make_mesh(dp=-1, device="cpu"), names={"w": ("layers", None, None)})
    params = fs.shard(stack, layout)

    def loss(params, x):
        kept = []
        x, _ = fs.scan_units(keeping, params, (x, kept), policy=fs.policies.POLICIES[policy])
        return x.sum() + sum(kept)

    def plain(stack, x):
        total = 0
        for w in stack["w"]:
            x = torch.tanh(x @ w)
            total = total + 100 * x.square().sum()
        return x.sum() + total

    if fs.policies.POLICIES[policy].activations != "all":
        assert "carry[1][0] is new: a tensor float32[]" in refusal(
            fs.value_and_grad(loss), params, X[:, :3], kind=TransformError
        )
        return
    found, grads = fs.value_and_grad(loss)(params, X[:, :3])
    want, value = torch.func.grad_and_value(plain)(stack, X[:, :3])
    assert_trees_close((found, fs.unshard(grads)), (value, want), rtol=1e-5)


def test_writes_into_what_a_function_closes_over_are_refused_under_torch_func():
    """Autograd keeps the tensor that was appended; under torch.func its gradient would be lost: 6 where 56 is right."""

    def total(w, recompute):
        kept = []

        def block(w):
            kept.append(50 * w)
            return w * w

        return recompute(block)(w) + sum(kept)

    w = torch.tensor(3.0, requires_grad=True)
    assert torch.autograd.grad(total(w, fs.remat), w)[0] == 2 * 3 + 50
    text = refusal(lambda: grad(total)(torch.tensor(3.0), fs.remat), kind=TransformError)
    assert "writes into its arguments would be lost" in text and "kept[0] is new" in text
