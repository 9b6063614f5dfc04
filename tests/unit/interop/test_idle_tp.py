"""Modules over `tp`: one that it would not shard at all is refused, one of which it shards little warns."""

import warnings

import pytest

import fsharding as fs
from fsharding.base.errors import ConfigError
from tests.helpers import refusal
from tests.hf_configs import SIZES

MESH = fs.AbstractMesh(("dp", "tp"), (2, 2))
INSIDE = "base_model.model.model"


def of_transformers(kind, **entries):
    import transformers

    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**SIZES, **entries))


def adapted():
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(of_transformers("Llama"), config)


def bytes_of(tensors):
    return sum(x.nbytes for x in tensors)


@pytest.mark.parametrize(
    ("make", "units"),
    [
        (lambda: of_transformers("Gemma3Text", head_dim=4, sliding_window=8), "model.layers.*"),
        (lambda: of_transformers("Olmo2"), "model.layers.*"),
        (adapted, (f"{INSIDE}.embed_tokens", f"{INSIDE}.layers.*", (f"{INSIDE}.norm", "base_model.model.lm_head"))),
    ],
    ids=["gemma3", "olmo2", "peft"],
)
def test_families_without_a_table_are_refused_over_tp(make, units):
    module = make()
    net = fs.functionalize(module, units)
    total = bytes_of({id(x): x for x in module.parameters()}.values())
    text = refusal(fs.plan_layout, net, MESH, kind=ConfigError)
    rule = f"fs.plan_layout shards no leaf ({total:,} bytes in all) over tp=2: its ranks would compute the same."
    assert text.splitlines()[0] == rule
    assert "Use tp=1, and dp=4 for these ranks" in text and 'tp="replicate"' in text
    replicated = fs.plan_layout(net, MESH, tp="replicate")
    assert not any("tp" in leaf.params.spec.all_axes for leaf in replicated.leaves)


def test_a_family_whose_vocabulary_alone_is_sharded_warns():
    module = of_transformers("Phi3", pad_token_id=0)
    total, vocabulary = (
        bytes_of(module.parameters()),
        bytes_of([module.model.embed_tokens.weight, module.lm_head.weight]),
    )
    with pytest.warns(UserWarning, match=f"shards {vocabulary:,} of {total:,} bytes over tp=2"):
        fs.plan_layout(fs.functionalize(module), MESH)


def test_setup_takes_the_same_word():
    def init(key):
        return {"w": fs.random.normal(key, (4, 4))}

    mesh = fs.make_mesh(dp=1, device="cpu")
    state, _ = fs.setup(init, lambda params, batch: None, fs.sgd(0.1), fs.random.key(0), mesh=mesh, tp="replicate")
    assert state.params["w"].shape == (4, 4)
    text = refusal(fs.setup, init, lambda params, batch: None, fs.sgd(0.1), fs.random.key(0), mesh=mesh, tp="none")
    assert "got tp='none'" in text
