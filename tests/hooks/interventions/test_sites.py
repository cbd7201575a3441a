"""Sites: their names, patterns, and where in each family's modules they are."""

from __future__ import annotations

import pickle

import pytest
import torch
from conftest import CONFIGS, VOCAB
from helpers_runner import part_of

from pymllm_interp.core.families import LayerPath
from pymllm_interp.core.model_spec import FAMILIES, Family, ModelSpec
from pymllm_interp.hooks.site import KINDS, WITHOUT_LAYER, Site, canonical, expand, path_names
from pymllm_interp.models.registry import NATIVE, architecture_of

LLAMA = FAMILIES["llama"]


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("resid_post.12", "resid_post.12"),
        ("  resid_post.12 ", "resid_post.12"),
        ("embed", "embed"),
        ("logits", "logits"),
        ("z.-1", "z.-1"),
        # TransformerLens
        ("hook_embed", "embed"),
        ("blocks.12.hook_resid_pre", "resid_pre.12"),
        ("blocks.12.hook_resid_mid", "resid_mid.12"),
        ("blocks.12.hook_resid_post", "resid_post.12"),
        ("blocks.12.hook_attn_out", "attn_out.12"),
        ("blocks.12.hook_mlp_out", "mlp_out.12"),
        ("blocks.3.attn.hook_q", "q.3"),
        ("blocks.3.attn.hook_k", "k.3"),
        ("blocks.3.attn.hook_v", "v.3"),
        ("blocks.3.attn.hook_z", "z.3"),
        ("blocks.3.mlp.hook_post", "mlp_act.3"),
        # module paths, as transformers and as nnsight write them
        ("model.embed_tokens", "embed"),
        ("model.layers.12", "resid_post.12"),
        ("model.layers[12]", "resid_post.12"),
        ("model.layers.12.output", "resid_post.12"),
        ("model.layers[12].output[0]", "resid_post.12"),
        ("model.model.layers[12].output", "resid_post.12"),
        ("model.layers.12.input", "resid_pre.12"),
        ("model.layers.12.input_layernorm", "attn_in.12"),
        ("model.layers.12.input_layernorm.input", "resid_pre.12"),
        ("model.layers.12.self_attn", "attn_out.12"),
        ("model.layers.12.self_attn.input", "attn_in.12"),
        ("model.layers.12.self_attn.q_proj", "q.12"),
        ("model.layers.12.self_attn.k_proj.output", "k.12"),
        ("model.layers.12.self_attn.o_proj", "attn_out.12"),
        ("model.layers.12.self_attn.o_proj.input", "z.12"),
        ("model.layers.12.post_attention_layernorm", "mlp_in.12"),
        ("model.layers.12.post_attention_layernorm.input", "resid_mid.12"),
        ("model.layers.12.mlp", "mlp_out.12"),
        ("model.layers.12.mlp.input", "mlp_in.12"),
        ("model.layers.12.mlp.down_proj.input", "mlp_act.12"),
        ("model.layers.12.mlp.down_proj", "mlp_out.12"),
        ("model.norm", "final_norm"),
        ("resid_post.012", "resid_post.12"),
        ("lm_head", "logits"),
        ("model.lm_head.output", "logits"),
        # nnterp
        ("token_embeddings", "embed"),
        ("layers_input[12]", "resid_pre.12"),
        ("layers_output[12]", "resid_post.12"),
        ("layers_output[-1]", "resid_post.-1"),
        ("model.layers_output[12]", "resid_post.12"),
        ("attentions_input[3]", "attn_in.3"),
        ("attentions_output[3]", "attn_out.3"),
        ("mlps_input[3]", "mlp_in.3"),
        ("mlps_output[3]", "mlp_out.3"),
    ],
)
def test_every_style_of_name_means_the_canonical_site(name, site):
    assert str(Site.parse(name)) == canonical(name) == site
    assert Site.parse(name) == Site.parse(site)


def test_a_site_prints_as_it_parses_and_is_a_key():
    sites = {Site(kind, None if kind in WITHOUT_LAYER else 7) for kind in KINDS}
    assert len(sites) == len(KINDS)
    for site in sites:
        assert Site.parse(str(site)) == site and pickle.loads(pickle.dumps(site)) in sites


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("resid_pots.12", r"unknown site 'resid_pots.12'; did you mean resid_post.12"),
        ("blocks.3.hook_resid_pst", r"did you mean blocks.3.hook_resid_post"),
        ("layer_output[3]", r"did you mean layers_output.3"),
        ("model.layers.4.mpl", r"did you mean model.layers.4.mlp"),
        ("banana", r"unknown site 'banana'; Kinds are embed, resid_pre, .*logits"),
        ("", r"unknown site ''"),
        ("model.layers.3.self_attn.q_norm", r"unknown site.*q_proj"),
        ("resid_post", r"needs a layer: resid_post.0.*resid_post\.\*"),
        ("model.layers", r"needs a layer: model.layers.0"),
        ("embed.3", r"'embed.3': embed has no layer"),
        ("resid_post.3.4", r"unknown site"),
        ("resid_post.x", r"unknown site 'resid_post.x'"),
        ("resid_post.{a}", r"'a' is neither a layer nor a range"),
        ("resid_post.{}", r"'' is neither a layer nor a range"),
        ("resid_post.{1..}", r"'1..' is neither a layer nor a range"),
        ("attn_pattern.3", r"is not a site: Capture\('pattern.3'\) reads attention patterns; to edit them"),
        ("blocks.3.attn.hook_attn_scores", r"reads attention patterns"),
        ("attention_probabilities[3]", r"reads attention patterns"),
        ("blocks.3.hook_mlp_in", r"the stream before the norm \(resid_mid\); what the MLP reads is mlp_in"),
        ("blocks.3.hook_attn_in", r"the stream before the norm \(resid_pre\)"),
        (
            "ln_final.hook_normalized",
            r"before the norm's weight multiplies; final_norm is after it.* the weight, lm.model.norm.weight",
        ),
        (
            "blocks.3.ln1.hook_normalized",
            r"before the norm's weight multiplies; attn_in is after it.*input_layernorm.weight",
        ),
        (
            "blocks.3.ln2.hook_normalized",
            r"before the norm's weight .* mlp_in is after it.*post_attention_layernorm.weight",
        ),
        ("blocks.3.ln2.hook_scale", r"the norm's divisor"),
        ("blocks.3.attn.hook_rot_q", r"that is q after RoPE; the site q is before it"),
        ("blocks.3.attn.hook_result", r"z of a head times its columns of o_proj's weight"),
        ("blocks.3.mlp.hook_pre", r"in a trace .* read mlp.gate_proj.output"),
        ("blocks.3.hook_q_input", r"the stream before the norm \(resid_pre\), a copy for each head"),
        ("resid_post_5", r"unknown site 'resid_post_5'; did you mean resid_post\.5 or"),
        ("resid_post5", r"did you mean resid_post\.5 or"),
        (
            "atn_in.3",
            r"Kinds are embed, resid_pre, q, k, v, z, attn_out, cross_attn_out, resid_mid, router, experts, mlp_act,",
        ),
    ],
)
def test_a_name_that_is_no_site_is_refused_with_the_nearest_ones_or_the_reason(name, error):
    with pytest.raises(ValueError, match=error):
        canonical(name)


@pytest.mark.parametrize("name", [None, 3, Site("resid_post", 3)])
def test_what_is_parsed_is_a_name(name):
    with pytest.raises(ValueError, match=r"a name is expected, such as 'resid_post.12'"):
        Site.parse(name)


@pytest.mark.parametrize("arguments", [("attn_pattern", 3), ("model.layers", 3), ("resid_post",), ("embed", 0)])
def test_a_site_that_is_built_from_parts_is_checked_too(arguments):
    with pytest.raises(ValueError):
        Site(*arguments)


@pytest.mark.parametrize("layer", [True, 1.0, "3"])
def test_a_layer_is_a_whole_number(layer):
    with pytest.raises(ValueError, match="whole number"):
        Site("resid_post", layer)


def test_one_site_is_wanted_where_one_is_parsed():
    with pytest.raises(ValueError, match="may name several sites"):
        Site.parse("resid_post.*")


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("mlp_out.*", [0, 1, 2, 3, 4, 5]),
        ("mlp_out.3", [3]),
        ("mlp_out.-1", [5]),
        ("mlp_out.{3,4}", [3, 4]),
        ("mlp_out.{4, 3, 4}", [3, 4]),
        ("mlp_out.{1..3}", [1, 2, 3]),
        ("mlp_out.{0..1,-2..-1}", [0, 1, 4, 5]),
        ("mlp_out.{2..-2}", [2, 3, 4]),
        ("mlps_output[*]", [0, 1, 2, 3, 4, 5]),
        ("blocks.{0,5}.hook_mlp_out", [0, 5]),
        ("model.layers.{1..2}.mlp", [1, 2]),
        (Site("mlp_out", -6), [0]),
    ],
)
def test_a_pattern_selects_layers_in_any_style_of_name(pattern, layers):
    assert expand(pattern, 6, LLAMA) == [Site("mlp_out", layer) for layer in layers]
    assert expand(canonical(pattern), 6, LLAMA) == expand(pattern, 6, LLAMA)


@pytest.mark.parametrize(
    "path", ["model.layers.1.mlp", "model.layers[1].self_attn.output", "model.layers.1.post_attention_layernorm",
             "model.layers.{0..1}.mlp.down_proj", "model.layers.1.self_attn.o_proj"],
)  # fmt: skip
def test_a_path_that_is_another_state_in_a_family_is_refused_there(path):
    for pattern in (path, canonical(path), pickle.loads(pickle.dumps(canonical(canonical(path))))):
        assert expand(pattern, 6, LLAMA)
        with pytest.raises(ValueError, match=r"is another state in gemma2 models than elsewhere: name the site"):
            expand(pattern, 6, FAMILIES["gemma2"])
        assert expand(str(Site.parse("mlp_out.1")), 6, FAMILIES["gemma2"]) == [Site("mlp_out", 1)]


def test_a_path_of_a_norm_behind_a_branch_is_its_contribution():
    path = "model.layers.1.post_feedforward_layernorm"
    assert expand(path, 6, FAMILIES["gemma2"]) == [Site("mlp_out", 1)]
    with pytest.raises(ValueError, match="another state in llama models"):
        expand(path, 6, LLAMA)


def test_a_site_without_layer_is_one_site():
    assert expand("final_norm", 6, LLAMA) == [Site("final_norm")]


@pytest.mark.parametrize(
    ("pattern", "error"),
    [
        ("resid_post.6", r"no layer 6; the model has 6 \(num_hidden_layers\), 0 to 5"),
        ("resid_post.-7", r"no layer -7"),
        ("resid_post.{0..6}", r"no layer 6"),
        ("resid_post.{0..999999999999}", r"no layer 999999999999"),
        ("resid_post.{3..1}", r"the range 3..1 runs backwards"),
        ("resid_post.{-1..0}", r"the range -1..0 runs backwards, from 5 to 0"),
    ],
)
def test_layers_that_the_model_does_not_have_are_refused(pattern, error):
    with pytest.raises(ValueError, match=error):
        expand(pattern, 6, LLAMA)


def test_a_kind_that_the_family_lacks_is_refused_by_name():
    parallel = Family(name="parallel", missing=frozenset({"resid_mid"}))
    with pytest.raises(ValueError, match=r"parallel models have no site 'resid_mid'; they have embed, resid_pre"):
        expand("resid_mid.*", 6, parallel)
    assert expand("resid_pre.0", 6, parallel)


def test_every_point_of_a_family_is_a_name_of_its_kind():
    for family in FAMILIES.values():
        lacking = {
            kind
            for kind, part in (
                ("router", family.router),
                ("experts", family.router),
                ("shared_out", family.shared),
                ("cross_attn_out", family.cross_attention),
            )
            if not part
        }
        assert set(family.points) == set(KINDS) - family.missing - lacking
        for kind, (module, end) in family.points.items():
            by_layer = isinstance(module, LayerPath)
            assert family.is_slice(kind) or by_layer or path_names(family)[f"{module}.{end}"] == kind
            assert ("{}" in module) == (kind not in WITHOUT_LAYER)


def info_of(name: str) -> ModelSpec:
    return ModelSpec.of(CONFIGS[name](), torch.float32)


@pytest.mark.parametrize("name", CONFIGS)
def test_native_and_transformers_models_have_the_modules_of_the_table(name, oracle):
    info = info_of(name)
    config = CONFIGS[name]()
    native = NATIVE[architecture_of(config)](config, info, "meta", 64)
    for kind in info.family.points:
        for site in expand(kind if kind in WITHOUT_LAYER else f"{kind}.*", info.num_hidden_layers, info.family):
            path = info.family.point(site).module
            assert isinstance(native.get_submodule(path), torch.nn.Module)
            assert isinstance(oracle(name).get_submodule(path), torch.nn.Module)


def states_of(model: torch.nn.Module, info: ModelSpec, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every site's value in one pass of transformers' model, [tokens, width]."""
    states: dict[str, torch.Tensor] = {}

    def keep(name: str, value):
        state = value[0] if isinstance(value, tuple) else value
        state = state if state.dim() == 2 else state[0]  # a router's rows are flat
        states[name] = part_of(info, name.partition(".")[0], state).clone()

    handles = []
    for kind in set(info.family.points) - {"experts"}:  # which are no state of a module
        for site in expand(kind if kind in WITHOUT_LAYER else f"{kind}.*", info.num_hidden_layers, info.family):
            path, end = info.family.point(site)
            module = model.get_submodule(path)
            if end == "output":
                handles.append(module.register_forward_hook(lambda _m, _a, out, name=str(site): keep(name, out)))
            else:
                handles.append(module.register_forward_pre_hook(lambda _m, args, name=str(site): keep(name, args)))
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    return states


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tables_points_hold_what_the_kinds_say(name, oracle):
    """Widths are the config's; the stream is the sum of what is added to it; q and k are before their norm and RoPE."""
    info, model = info_of(name), oracle(name)
    family = info.family
    states = states_of(model, info, torch.arange(7)[None] * 5 % VOCAB)
    for text, state in states.items():
        assert state.shape == (7, info.width(Site.parse(text).kind)), text
    if "embed" in states:
        torch.testing.assert_close(states["resid_pre.0"], states["embed"], rtol=0, atol=0)
    for i in range(info.num_hidden_layers):
        of = {kind: states.get(f"{kind}.{i}") for kind in family.points if kind not in WITHOUT_LAYER}
        layer = model.get_submodule(f"{family.layers}.{i}")
        attention, mlp = layer.get_submodule(family.attention), layer.get_submodule(family.mlp)
        attn_end, mlp_end = (family.attn_out, family.mlp_out)
        parallel = getattr(model.config, "use_parallel_residual", False)
        middle = of["resid_pre"] if parallel else of["resid_pre"] + of["attn_out"]
        torch.testing.assert_close(of.get("resid_mid", middle), middle)
        torch.testing.assert_close(of["resid_pre"] + of["attn_out"] + of["mlp_out"], of["resid_post"])
        torch.testing.assert_close(layer.get_submodule(family.attention_norm)(of["resid_pre"]), of["attn_in"])
        torch.testing.assert_close(layer.get_submodule(family.mlp_norm)(middle), of["mlp_in"])
        out = attention.get_submodule(family.o_proj)(of["z"])
        sparse = "mlp_act" in family.missing
        neurons_out = of["mlp_out"] if sparse else mlp.get_submodule(family.down_proj)(of["mlp_act"])
        torch.testing.assert_close(layer.get_submodule(attn_end)(out) if attn_end else out, of["attn_out"])
        torch.testing.assert_close(layer.get_submodule(mlp_end)(neurons_out) if mlp_end else neurons_out, of["mlp_out"])
        for kind in "qkv":
            projection = attention.get_submodule(family.qkv or f"{kind}_proj")
            torch.testing.assert_close(part_of(info, kind, projection(of["attn_in"])), of[kind])
    last = states[f"resid_post.{info.num_hidden_layers - 1}"]
    torch.testing.assert_close(model.get_submodule(family.final_norm)(last), states["final_norm"])
    torch.testing.assert_close(model.get_submodule("lm_head")(states["final_norm"]), states["logits"])


def test_shapes_come_from_the_config():
    info = info_of("llama-rope")
    assert info.shape("q") == info.shape("z") == (4, 24) and info.shape("k") == info.shape("v") == (1, 24)
    assert info.width("z") == 96 and info.width("resid_post") == 64 and info.width("mlp_act") == 56
    assert info.width("logits") == VOCAB
    assert info_of("llama").shape("k") == (3, 8)  # no head_dim in the config's arguments: hidden over heads


def test_a_model_type_without_a_table_is_refused():
    config = CONFIGS["llama"]()
    config.model_type = "mamba"
    with pytest.raises(ValueError, match=r"no table of sites for 'mamba' models; there is one for llama, mistral"):
        ModelSpec.of(config, torch.float32)
