"""Hugging Face directories whose weights are codes, on one process: the law of codes, what is kept, what is refused."""

import itertools
import json

import pytest
import safetensors.torch
import torch

import fsharding as fs
from fsharding import formats
from fsharding.base.errors import CheckpointError, ConfigError
from fsharding.checkpoint import byte_ranges
from fsharding.formats import codec
from fsharding.formats.precision import KEEP
from fsharding.interop import hf
from fsharding.models import DecoderConfig, Experts
from fsharding.testing import assert_bitwise_equal
from tests.helpers import refusal

pytestmark = pytest.mark.filterwarnings("ignore:fs.hf.save writes .* not multiples")
"""Blocks at edges are what many tests here are about."""

SMALL = formats.Blocks(formats.E4M3, (6, 4))
SIZES = {"vocab_size": 10, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 14}
CONFIGS = {
    "llama": DecoderConfig(**SIZES),
    "fused": DecoderConfig(**SIZES, bias=True, tied=True, fused=True),
    "mixtral": DecoderConfig(**SIZES, experts=Experts(3, 2, 14)),
}


def layout_of(config, **how):
    return fs.plan_layout(fs.models.decoder(config), fs.make_mesh(dp=1), **how)


def params_of(layout, seed=0):
    """Random parameters of all sizes, a block of zeros among them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape):
        x = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-3, 3, shape, generator=generator)
        if len(shape) > 1:
            x[..., :7, :5] = 0.0
        return x

    return fs.shard(fs.tree.unflatten(layout.structure, [draw(leaf.shape) for leaf in layout.leaves]), layout)


def in_file(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def by_hand(codes, scales, block):
    """Codes times the scales of their blocks, element by element in float64, rounded to float32."""
    result = torch.empty(codes.shape)
    wide, scales = codes.double(), scales.double()
    for i, j in itertools.product(*map(range, codes.shape)):
        result[i, j] = wide[i, j] * scales[i // block[0], j // block[1]]
    return result


def rounded(x, format):
    """A tensor rounded to a format."""
    scales = codec.scales_of(codec.amaxes(x, format.sizes(tuple(x.shape))), format)
    return codec.decode(codec.encode(x, scales, format), scales, format)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_loaded_is_what_was_saved_rounded_once(name, tmp_path, monkeypatch):
    monkeypatch.setattr(byte_ranges, "WINDOW_BYTES", 300)
    config = CONFIGS[name]
    layout = layout_of(config)
    params = params_of(layout)
    hf.save(tmp_path / "plain", params, config, layout)
    hf.save(tmp_path / "coded", params, config, layout, format=SMALL)
    plain, coded = in_file(tmp_path / "plain"), in_file(tmp_path / "coded")
    read = fs.foreign.open_weights(tmp_path / "coded")
    assert {*read.leaves} == {*plain}
    for weight, x in plain.items():
        out = torch.empty(x.shape)
        read.read(weight, tuple((0, n) for n in x.shape), out)
        if ("_proj" in weight and x.ndim == 2) or ".experts." in weight:
            codes, scales = coded[weight], coded[f"{weight}_scale_inv"]
            assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
            assert scales.shape == (-(-x.shape[0] // 6), -(-x.shape[1] // 4))
            assert torch.equal(out, rounded(x, SMALL)) and torch.equal(out, by_hand(codes, scales, (6, 4)))
        else:
            assert torch.equal(out, x) and torch.equal(coded[weight], x), weight
    assert len(coded) == len(plain) + sum(x.dtype == torch.float8_e4m3fn for x in coded.values())
    entries = json.loads((tmp_path / "coded/config.json").read_text())
    ends = ["model.embed_tokens"] if config.tied else ["lm_head", "model.embed_tokens"]
    routers = [f"model.layers.{i}.block_sparse_moe.gate" for i in range(2)] if config.experts else []
    assert entries["dtype"] == "float32" and entries["quantization_config"] == {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [6, 4], "activation_scheme": "dynamic",
        "modules_to_not_convert": [*ends, *routers],
    }  # fmt: skip
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    # What was read is written as it was: rounding again moves nothing.
    again = hf.load(tmp_path / "coded", layout, hf.names_of(config))
    hf.save(tmp_path / "again", again, {**entries}, layout, names=hf.names_of(config), format=SMALL)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "coded" / file).read_bytes()
    assert hf.config_of(tmp_path / "coded") == hf.config_of(tmp_path / "plain")
    # And as plain numbers it goes out without a word of codes.
    hf.save(tmp_path / "wide", again, {**entries}, layout, names=hf.names_of(config), dtype=torch.bfloat16)
    entries = json.loads((tmp_path / "wide/config.json").read_text())
    assert entries["dtype"] == "bfloat16" and "quantization_config" not in entries


def test_files_have_the_numbers_that_a_run_in_this_format_computes_with(tmp_path):
    config = DecoderConfig(vocab_size=10, dim=144, layers=2, heads=4, kv_heads=2, intermediate_size=200)
    precision = fs.Precision(
        params=torch.float32,
        compute=torch.bfloat16,
        gather=formats.E4M3_128x128,
        keep=(*KEEP, "blocks[-1]"),
    )
    layout = layout_of(config, strategy=fs.zero(0), precision=precision)
    state = fs.init_state(fs.models.decoder(config), fs.adamw(1e-3), fs.random.key(0), layout)
    hf.save(tmp_path / "out", state, config, format=formats.E4M3_128x128, dtype=torch.bfloat16)
    names = {name for name, x in in_file(tmp_path / "out").items() if x.dtype == torch.float8_e4m3fn}
    assert len(names) == 7 and all(name.startswith("model.layers.0.") for name in names)  # the last layer is kept
    loaded = hf.load(tmp_path / "out", layout)
    assert_bitwise_equal(fs.tree.map(lambda x: x.to_local().bfloat16(), loaded),
                         fs.tree.map(lambda x: x.to_local().bfloat16(), state.params))  # fmt: skip


def test_other_names_load_it_as_well(tmp_path):
    layout = layout_of(CONFIGS["llama"])
    hf.save(tmp_path / "out", params_of(layout), CONFIGS["llama"], format=SMALL)
    want, names = hf.load(tmp_path / "out", layout), hf.names_of(CONFIGS["llama"])
    assert_bitwise_equal(fs.foreign.load_weights(tmp_path / "out", layout, names), want)
    assert_bitwise_equal(hf.load(tmp_path / "out", layout, names), want)
    # The file itself has codes and scales, for who wants these.
    raw = fs.foreign.open_weights(tmp_path / "out/model.safetensors").leaves
    assert raw["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert raw["model.layers.0.mlp.up_proj.weight_scale_inv"].shape == (3, 4)


def published(folder, tensors, **entries):
    """A directory as somebody else has written it."""
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    said = {"quant_method": "fp8", "weight_block_size": [2, 3], "activation_scheme": "dynamic", **entries}
    (folder / "config.json").write_text(json.dumps({"quantization_config": said}))
    return folder


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("of_scales", [torch.float32, torch.bfloat16], ids=str)
def test_codes_and_scales_of_other_dtypes(tmp_path, dtype, of_scales):
    codes = torch.randn(3, 5, 7).to(dtype)
    scales = torch.rand(3, 3, 3).to(of_scales)
    folder = published(
        tmp_path / "x", {"w": codes, "w_scale_inv": scales, "b": torch.ones(2)}, fmt=None, scale_fmt="ue8m0"
    )
    layout = fs.plan_layout({"x": torch.empty(3, 5, 7), "b": torch.empty(2)}, fs.make_mesh(dp=1))
    loaded = hf.load(folder, layout, {"x": "w", "b": "b"})
    want = torch.stack([by_hand(c, s, (2, 3)) for c, s in zip(codes, scales, strict=True)])
    assert torch.equal(loaded["x"].to_local(), want)


def test_directories_in_other_formats_are_refused(tmp_path):
    layout = fs.plan_layout({"x": torch.empty(4, 6)}, fs.make_mesh(dp=1))
    good = {"w": torch.ones(4, 6).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(2, 2)}
    read = (
        "supported is quant_method 'fp8' with weight_block_size [rows, columns], fmt 'e4m3' or 'e5m2' and "
        "activation_scheme 'dynamic'"
    )
    mend = (
        "Write the model in bfloat16 first: in transformers, dequantize() and save_pretrained(). To read values "
        "and scales as stored, open the file or the index instead of its directory."
    )
    cases = {
        "gptq": ({"quant_method": "gptq", "bits": 4}, f"quantization_config has quant_method 'gptq': {read}"),
        "static": ({"activation_scheme": "static"}, f"quantization_config has activation_scheme 'static': {read}"),
        "fmt": ({"fmt": "e3m4"}, f"quantization_config has fmt 'e3m4': {read}"),
        "tensor": ({"weight_block_size": None}, f"quantization_config has weight_block_size None: {read}"),
        "size": (
            {"weight_block_size": [128, 1 << 60]},
            f"quantization_config has weight_block_size [128, {1 << 60}]: {read}",
        ),
    }
    for name, (entries, row) in cases.items():
        folder = published(tmp_path / name, good, **entries)
        for function, load in (
            ("fs.hf.load", lambda folder: hf.load(folder, layout, {"x": "w"})),
            ("fs.foreign.open_weights", fs.foreign.open_weights),
            ("fs.foreign.load_weights", lambda folder: fs.foreign.load_weights(folder, layout, {"x": "w"})),
        ):
            assert refusal(load, folder, kind=CheckpointError) == (f"{function} cannot read {folder}.\n  {row}\n{mend}")
        said = hf.config_json(CONFIGS["llama"]) | json.loads((folder / "config.json").read_text())
        assert refusal(hf.config_of, said, kind=ConfigError).splitlines()[1] == f"  {row}"
        # Where a decoder is asked for, the row stands there once.
        (folder / "config.json").write_text(json.dumps(said))
        assert refusal(hf.load, folder, layout_of(CONFIGS["llama"]), kind=CheckpointError).count(row) == 1
    assert hf.config_of(hf.config_json(CONFIGS["llama"], quantization_config=None)) == CONFIGS["llama"]
    torn = published(tmp_path / "torn", good)
    (torn / "config.json").write_text("{")
    assert "\n  config.json: " in refusal(fs.foreign.open_weights, torn, kind=CheckpointError)


def test_codes_and_scales_that_do_not_fit_are_refused(tmp_path):
    codes = torch.ones(4, 6).to(torch.float8_e4m3fn)
    folder = published(tmp_path / "x", {
        "a": codes, "b": codes.clone(), "b_scale_inv": torch.ones(2, 3), "c": codes.clone(), "c_scale_inv": torch.ones(2, 2).int(),
        "d": torch.ones(4, 6), "d_scale_inv": torch.ones(2, 2), "e": codes[0, 0].clone(),
    })  # fmt: skip
    rows = refusal(fs.foreign.open_weights, folder, kind=CheckpointError).splitlines()
    assert sorted(rows[1:-1]) == [
        "  a is float8_e4m3fn[4, 6], and a_scale_inv is missing; wanted is float32[2, 2]",
        "  b_scale_inv is float32[2, 3], wanted is float32[2, 2]: b is float8_e4m3fn[4, 6] in blocks of (2, 3)",
        "  c_scale_inv is int32[2, 2], wanted is float32[2, 2]: c is float8_e4m3fn[4, 6] in blocks of (2, 3)",
        "  d_scale_inv are the scales of d, which is float32[4, 6]",
        "  e is float8_e4m3fn[]: quantized values have at least one dim",
    ]


def test_what_cannot_be_written_as_codes(tmp_path):
    config, layout = CONFIGS["llama"], layout_of(CONFIGS["llama"])
    mend = (
        "Pass rectangular blocks of e4m3 with float32 scales, such as format=fs.formats.E4M3_128x128, or only dtype=."
    )
    for format, why in (
        (formats.MXFP8, "is float8_e4m3fn[1x32, e8m0]"),
        (formats.TENSORWISE, "is float8_e4m3fn[tensor, float32]"),
        (SMALL.with_rounding("stochastic"), "is float8_e4m3fn[6x4, float32, stochastic]"),
        ("fp8", "is a str"),
    ):
        assert refusal(hf.save, tmp_path / "out", params_of(layout), config, format=format, kind=CheckpointError) == (
            f"fs.hf.save got a format that {why}, which these files do not support.\n{mend}"
        )
    params = params_of(layout)
    params["blocks"]["wo"].to_local()[1, 3, 9] = torch.nan
    params["blocks"]["up"].to_local()[0, 2, 2] = -torch.inf
    params["head"]["unembed"].to_local()[0, 0] = torch.nan  # stays a number, so it may be none
    assert refusal(hf.save, tmp_path / "out", params, config, format=SMALL, kind=CheckpointError) == (
        f"fs.hf.save cannot write {tmp_path / 'out'} in float8_e4m3fn[6x4, float32].\n"
        "  model.layers.0.mlp.up_proj.weight has inf or NaN in 1 of its 12 blocks of 6x4\n"
        "  model.layers.1.self_attn.o_proj.weight has inf or NaN in 1 of its 12 blocks of 6x4\n"
        "Save an earlier state, or omit format=."
    )
    assert not any(tmp_path.iterdir())
