"""Copies of parameters at rest, of which codes travel: they are main parameters gathered by torch and rounded whole."""

import itertools
import math
import zlib
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Replicate

import fsharding as fs
from fsharding import formats
from fsharding.comm import redistribute
from fsharding.comm.counters import count_bytes
from fsharding.formats import Blocks, codec
from fsharding.formats.precision import KEEP, Precision
from fsharding.mesh.abstract_mesh import AXES
from fsharding.sharding.named_sharding import local_of
from fsharding.sharding.partition_spec import Fused
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.decoders import DecoderCase
from tests.helpers import TRANSPORTS, bits, full, mesh_of

FORMATS = {
    "mx": formats.MXFP8, "nvfp4": formats.NVFP4, "tensor": formats.TENSORWISE, "row": formats.ROWWISE,
    "squares": Blocks(formats.E4M3, (32, 32)), "mxfp4": formats.MXFP4, "1x128": formats.E4M3_1x128,
    "e5m2": formats.MXFP8_E5M2,
}  # fmt: skip
FORMATS |= {f"{name} stochastic": FORMATS[name].with_rounding("stochastic") for name in ("mx", "nvfp4", "tensor")}
INNER = replace(fs.zero(1), replica_params=True)
STRATEGIES = {f"zero{level}": fs.zero(level) for level in range(3)} | {
    "hfsdp": fs.hybrid(opt_state=True),
    "params over replica": INNER,
}

# Sizes that ranks cut evenly and not, on borders of blocks and through blocks; one has fewer rows than there are ranks.
SHAPES = {
    "blocks": {"up": (5, 40, 72), "down": (5, 72, 33), "few": (5, 2, 64), "norm": (5, 40)},
    "experts": (4, 40, 48),
    "even": (128, 96),
    "few": (3, 64),
    "qkv": (48, 96),
    "vector": (50,),
}
NAMES = {
    "blocks": {
        "up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed"), "few": ("layers", None, "mlp"),
        "norm": ("layers", None),
    },
    "experts": (None, None, None),
    "even": ("mlp", "embed"),
    "few": (None, None),
    "qkv": ("embed", Fused("mlp", (48, 24, 24))),
    "vector": (None,),
}  # fmt: skip
STAGES = {"blocks": [[0, 3], [1, 2, 4]], "even": 1}
KEEPS = {"all": KEEP, "some": (*KEEP, "blocks[1:3]", "blocks[-1]")}


def values(seed):
    leaves, spec = fs.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    generator = torch.Generator().manual_seed(seed)
    return fs.tree.unflatten(spec, [torch.randn(shape, generator=generator) for shape in leaves])


def planned(axes, strategy, precision, transport="auto"):
    mesh, stages = mesh_of(axes, transport=transport), STAGES if "pp" in axes else None
    return fs.plan_layout(values(0), mesh, strategy=strategy, precision=precision, names=NAMES, stages=stages)


def put_together(x):
    """What torch knows of a DTensor: all of it, or of a leaf with owners along `pp` or `tp` their part."""
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local()


def rounded_whole(x, leaf, layout, key):
    """A main parameter, put together by torch, rounded as one tensor, and the copy's part of it."""
    whole, dtype = put_together(x), layout.param_dtype(leaf)
    result, format = whole.to(dtype), layout.rounds(leaf)
    layers = [i for a, b in leaf.main.grid(leaf.shape)[0] for i in range(a, b)] if leaf.is_stacked else None
    if format is None:
        return result
    noise, shape = None, tuple(whole.shape)
    if format.stochastic:
        runs = [((0, n),) for n in shape]
        if layers is not None:
            runs[0], shape = tuple((i, i + 1) for i in layers), (leaf.shape[0], *shape[1:])
        noise = formats.uniform_at(key, zlib.crc32(leaf.path.encode()), shape, runs, whole.device)
    codes, scales = codec.coded(whole, format, noise=noise)
    rounded = codec.decode(codes, scales, format, dtype)
    for place, layer in enumerate(layers or ()):
        if layer in layout.precision.kept_rows(leaf.path, leaf.shape[0]):
            rounded[place] = result[place]
    return rounded


def spread(cases):
    """Checks copies of main parameters in each case, into new memory and into that of earlier ones."""
    for number, (axes, strategy, precision, limit, transport) in enumerate(cases):
        layout, key = planned(axes, strategy, precision, transport), torch.tensor([number, 7])
        before, main = fs.shard(values(2 * number), layout.main), fs.shard(values(2 * number + 1), layout.main)
        placed = fs.init_state(lambda key: values(0), fs.sgd(0.1), fs.random.key(0), layout).params
        given = bits(main)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(redistribute, "BUCKET_BYTES", limit)
            first = fs.params_from_main(before, placed, layout, key=key)
            copies = fs.params_from_main(main, placed, layout, key=key)
            memory = [local_of(x).data_ptr() for x in fs.tree.leaves(first)]
            donated = fs.params_from_main(main, first, layout, donate=True, key=key)
        assert_bitwise_equal(bits(main), given, "main parameters stay")
        assert_bitwise_equal(bits(donated), bits(copies), "donated or not")
        leaves = zip(*map(fs.tree.leaves, (main, copies, donated)), layout.leaves, memory, strict=True)
        for x, copy, other, leaf, place in leaves:
            if leaf.params.grid(leaf.shape) is None:
                continue
            text = f"{leaf.path} in {layout.rounds(leaf)}, {strategy} on {axes}"
            assert copy.placements == leaf.params.placements(), text
            assert_bitwise_equal(put_together(copy), rounded_whole(x, leaf, layout, key), text)
            if layout.rounds(leaf) is not None and strategy != INNER and local_of(copy).numel():
                assert local_of(other).data_ptr() == place, f"{text}: what is donated is where copies arrive"


def with_format(name, **roles):
    return Precision(params=torch.float32, compute=torch.bfloat16, gather=FORMATS[name], **roles)


def cases_on(axes, names, strategies, keeps=("some",), limits=(1 << 25, 1000), transport="auto"):
    precisions = [with_format(name, keep=KEEPS[keep]) for name in names for keep in keeps]
    precisions += [Precision(gather=FORMATS[names[0]])]
    return [(axes, STRATEGIES[s], p, limit, transport) for s in strategies for p in precisions for limit in limits]


PLACES = {
    "dp3": {"dp": 3}, "dp2tp2": {"dp": 2, "tp": 2}, "replica2dp2": {"replica": 2, "dp": 2}, "pp2dp2": {"pp": 2, "dp": 2},
}  # fmt: skip
MORE = {"dp4": {"dp": 4}, "cp2ep2": {"cp": 2, "ep": 2}, "tp4": {"tp": 4}, "replica2tp2": {"replica": 2, "tp": 2}}
MORE |= {"replica2dp2tp2": {"replica": 2, "dp": 2, "tp": 2}, "pp2cp2": {"pp": 2, "cp": 2}, "dp7": {"dp": 7}}


@pytest.mark.parametrize("place", PLACES)
def test_copies_are_the_whole_main_parameters_rounded(place):
    strategies = [*STRATEGIES] if "replica" in PLACES[place] else ["zero1"]
    cases = cases_on(PLACES[place], ["mx", "nvfp4 stochastic", "tensor"], strategies)
    run_ranks(spread, math.prod(PLACES[place].values()), cases)


@full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place", [*PLACES, *MORE])
def test_copies_in_every_format_are_the_whole_main_parameters_rounded(place):
    axes = {**PLACES, **MORE}[place]
    cases = cases_on(axes, [*FORMATS], STRATEGIES, keeps=KEEPS)
    run_ranks(spread, math.prod(axes.values()), cases, timeout=1700)


CROSSED = [*itertools.combinations(AXES, 2), *itertools.combinations([axis for axis in AXES if axis != "replica"], 3)]


@full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("names", CROSSED, ids="-".join)
def test_copies_on_meshes_of_all_axes(names):
    axes, strategies = dict.fromkeys(names, 2), [*STRATEGIES] if "replica" in names else ["zero1", "zero2"]
    run_ranks(spread, 2 ** len(names), cases_on(axes, ["mx", "nvfp4 stochastic", "row"], strategies), timeout=1700)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_transport_changes_a_copy(transport):
    run_ranks(spread, 2, cases_on({"dp": 2}, ["mx", "mxfp4"], ["zero1"], transport=transport))


# ----------------------------------------------------------------------------------------------------------------- bytes
ODD = fs.models.DecoderConfig(vocab_size=48, dim=48, layers=4, heads=4, kv_heads=4, intermediate_size=72)
EVEN = fs.models.DecoderConfig(vocab_size=64, dim=128, layers=4, heads=4, kv_heads=4, intermediate_size=256)


def trained(cases):
    return [case.train(foresee=True) for case in cases]


@pytest.mark.parametrize(
    "axes",
    [*PLACES.values(), *(pytest.param(dict.fromkeys(axes, 2), marks=full) for axes in CROSSED)],
    ids="-".join,
)
def test_a_step_sends_what_is_foreseen_and_no_strategy_changes_a_bit(axes):
    """`DecoderCase.train` compares each step with `expected_traffic`."""
    pipe = {"microbatches": 2} if "pp" in axes else {}
    case = DecoderCase(ODD, fs.AbstractMesh(tuple(axes), tuple(axes.values())), rows=24, length=4, steps=2, **pipe)
    strategies = [fs.zero(level) for level in range(4)] + (
        [fs.hybrid(), fs.hybrid(opt_state=True), INNER] if "replica" in axes else []
    )
    for name, keep in (("mx", "all"), ("nvfp4 stochastic", "some")):
        precision = with_format(name, keep=KEEPS[keep])
        cases = [replace(case, strategy=s, precision=precision, donate=bool(i % 2)) for i, s in enumerate(strategies)]
        first, *others = run_ranks(trained, case.ranks, cases)
        for other in others:
            assert_bitwise_equal(other, first, "the ranks' results")
        if not pipe and "replica" not in axes:
            assert all(torch.equal(x, first[0]) for x in first)


def sent(precisions, strategy, axes):
    """Bytes of this rank when copies are made of the matrices of a decoder's blocks, in each precision."""
    result = []
    for precision in precisions:
        model = fs.models.decoder(EVEN)
        layout = fs.plan_layout(model, mesh_of(axes), strategy=strategy, precision=precision)
        state = fs.init_state(model, fs.sgd(0.1), fs.random.key(0), layout)
        with count_bytes() as traffic:
            fs.params_from_main(state.main, state.params, layout)
        others = [leaf for leaf in layout.leaves if with_format("mx").format_of(leaf.path, len(leaf.shape) - 1) is None]
        without = sum(math.prod(leaf.main.local_shape(leaf.shape)) for leaf in others if leaf.main != leaf.params)
        result.append(traffic.bytes - without * 2 * (axes["dp"] - 1))
    return result


def test_codes_of_copies_are_half_the_bytes_of_bfloat16():
    mx, bf16, nvfp4 = run_ranks(sent, 2, [fs.MXFP8, fs.BF16, with_format("nvfp4")], fs.zero(1), {"dp": 2})[0]
    assert mx / bf16 == 33 / 64
    assert 0.28 < nvfp4 / bf16 < 0.282
