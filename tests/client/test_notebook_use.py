"""What print, shift-tab and Tab show; and messages that say what to write instead."""

from __future__ import annotations

import copy
import inspect
import pickle
import pydoc
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_declared import prompt_of
from helpers_saes import random_sae

from pymllm_interp import LM, Ablate, Capture, Clamp, Gate, Patch, SamplingParams, Scale, Steer
from pymllm_interp.captures import Features, Lens
from pymllm_interp.client.calls.known_names import fits_name
from pymllm_interp.client.calls.model import RENAMED
from pymllm_interp.client.notebook.tab_completion import set_up_completion
from pymllm_interp.client.request_options import OPTIONS, TRACE_OPTIONS
from pymllm_interp.hooks.site import expand
from pymllm_interp.interventions import Knockout, SetFeature

GREEDY = SamplingParams(temperature=0, max_tokens=3)
VECTOR = torch.ones(72)


@pytest.fixture
def lm(lm_of: Callable[..., LM]) -> LM:
    return lm_of("llama")


# -- print -----------------------------------------------------------------------------------


def test_results_print_no_numbers_of_tensors(lm: LM) -> None:
    (out,) = lm.generate([prompt_of(6, 1)], GREEDY, capture=["resid_post.*", "resid_mid.{0,2}", "logits"])
    states = "resid_mid.{0,2} [8, 72], resid_post.{0..2} [8, 72], logits [3, 97]"
    assert repr(out.activations) == f"Activations({states})"
    assert repr(out.activations.positions) == "BySite(resid_mid.{0,2} [8], resid_post.{0..2} [8], logits [3])"
    assert repr(out) == f"RequestOutput(request_id={out.request_id!r}, prompt_tokens=6, outputs=[{out.outputs[0]!r}])"
    completion = f"index=0, text={out.text!r}, tokens=3, finish_reason='length', activations=Activations({states})"
    assert repr(out.outputs[0]) == f"CompletionOutput({completion})"
    (passed,) = lm.forward([prompt_of(6, 1)], capture=["resid_post.1"])
    assert (
        repr(passed) == "ForwardOutput(prompt_tokens=6, activations=Activations(resid_post.1 [6, 72], logits [6, 97]))"
    )
    _, cache = lm.run_with_cache(prompt_of(6, 1), "resid_post.*")
    assert repr(cache) == "ActivationCache(resid_post.{0..2} [1, 6, 72])"


def test_handles_engines_and_sessions_say_their_state(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama", seed=31)
    name = "RemoteEngine" if getattr(lm, "is_remote", False) else "Engine"
    assert repr(lm.engine).startswith(f"{name}(") and "idle" in repr(lm.engine)
    handle = lm.submit(prompt_of(6, 1), replace(GREEDY, max_tokens=100, ignore_eos=True))
    assert repr(handle).startswith("RequestHandle(") and len(repr(handle)) < 60
    handle.result()
    assert repr(handle).endswith(": length, 100 tokens)")
    assert repr(lm.session()) == f"{type(lm.session()).__name__}(saves on cpu)"


@pytest.mark.local
def test_a_model_prints_what_it_is_before_its_tree(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama", seed=32)
    first, second, *_ = str(lm).splitlines()
    source = lm.runner.source
    assert source is not None and first == f"LM({source.name}, {lm.runner.device}, float32, engine: idle)"
    assert second == "LlamaForCausalLM("
    lm.shutdown()
    assert str(lm).splitlines()[0].endswith("engine: shut down)") and repr(lm.engine).startswith("Engine(shut down")


def test_a_model_has_its_facts(lm: LM) -> None:
    assert (lm.num_layers, lm.hidden_size) == (3, 72)
    config = lm.hf_config
    assert (lm.num_heads, lm.vocab_size) == (config.num_attention_heads, config.vocab_size)
    assert lm.cfg.d_head == config.head_dim
    assert {"embed", "resid_post.*", "final_norm", "logits", "pattern.*"} <= set(lm.sites)
    (out,) = lm.generate([prompt_of(4, 1)], GREEDY, capture=lm.sites)
    wanted = {str(site) for one in lm.sites for site in expand(one, lm.num_layers, lm.model_spec.family)}
    assert set(out.activations) == wanted


def test_a_config_is_read_by_the_names_of_transformers_and_transformer_lens(lm: LM) -> None:
    config = lm.hf_config
    assert (lm.cfg.num_hidden_layers, lm.cfg.n_layers, lm.cfg.d_model) == (3, 3, 72)
    assert (lm.cfg.n_heads, lm.cfg.d_head, lm.cfg.d_vocab) == (lm.num_heads, lm.model_spec.head_dim, lm.vocab_size)
    assert (lm.cfg.d_mlp, lm.cfg.n_ctx) == (config.intermediate_size, lm.limits.max_model_len)
    assert repr(lm.cfg) == repr(config) and lm.cfg.to_dict() == config.to_dict()
    for copied in (copy.deepcopy(lm.cfg), pickle.loads(pickle.dumps(lm.cfg))):
        assert type(copied) is type(config) and copied.to_dict() == config.to_dict()
    with pytest.raises(AttributeError, match=r"LlamaConfig has no attribute 'n_lyers': print\(lm.cfg\)"):
        lm.cfg.n_lyers  # noqa: B018
    with pytest.raises(AttributeError, match=r"lm\.cfg\.hidden_size = .* is not served: the model is built"):
        lm.cfg.hidden_size = 3


def test_dir_shows_public_names(lm: LM) -> None:
    shown = dir(lm)
    assert {
        "generate",
        "trace",
        "sweep",
        "cfg",
        "num_layers",
        "vocab_size",
        "model",
        "lm_head",
        "tokenizer",
        "edit",
    } <= set(shown)
    hidden = {"interleave", "interleaver", "OVERLOAD_PREFIX", *RENAMED}
    assert not hidden & set(shown) and not [name for name in shown if name.startswith("_")]
    assert all(hasattr(lm, name) for name in set(shown) - {"input", "inputs", "output", "logits", "samples", "source"})
    layer = dir(lm.model.layers[0])
    assert {"self_attn", "mlp", "output", "input", "skip", "source"} <= set(layer)
    assert not hidden & set(layer) and not [name for name in layer if name.startswith("_")]


# -- shift-tab -------------------------------------------------------------------------------

FIRST = {
    "sweep": "runs",
    "imap": "prompts",
    "chat": "messages",
    "submit": "prompt",
    "stream": "prompt",
    "astream": "prompt",
}
REFUSED = {"sweep": {"interventions"}, "run_with_cache": {"capture"}, "run_with_hooks": {"capture"}}


@pytest.mark.parametrize(
    "call",
    [
        "generate", "agenerate", "chat", "sweep", "imap", "submit", "stream", "astream", "forward", "run_with_cache",
        "run_with_hooks",
    ],
)  # fmt: skip
def test_signatures_name_the_options(call: str, lm: LM) -> None:
    shown = inspect.signature(getattr(lm, call)).parameters
    assert set(OPTIONS) - set(shown) == REFUSED.get(call, set())
    assert FIRST.get(call, "prompts") in shown and "self" not in shown and "options" not in shown
    assert ("sampling_params" in shown) == (call not in ("forward", "run_with_cache", "run_with_hooks"))
    for name in set(OPTIONS) & set(shown):
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY and shown[name].default in (None, 0)


@pytest.mark.parametrize("spec", [Steer, Ablate, Clamp, Scale, Patch, Gate, Capture, Knockout, SetFeature])
def test_help_of_a_spec_has_its_arguments(spec: type) -> None:
    text = pydoc.render_doc(spec, renderer=pydoc.plaintext)
    described = text.partition("Args:")[2].partition("Raises:")[0]
    for name in inspect.signature(spec).parameters:
        assert re.search(rf"^ \|  *(\w+, )*{name}(, \w+)*: ", described, flags=re.MULTILINE), name
    if spec not in (Scale, Capture, Knockout, SetFeature):
        assert "[width]" in described


@pytest.mark.parametrize("call", ["trace", "scan", "pipe"])
def test_signatures_of_traces_name_their_options(call: str, lm: LM) -> None:
    assert set(TRACE_OPTIONS) <= set(inspect.signature(getattr(lm, call)).parameters)


def test_the_options_that_a_signature_names_are_taken_with_their_defaults(lm: LM) -> None:
    for call in (lm.generate, lm.forward, lm.agenerate):
        shown = inspect.signature(call).parameters
        defaults = {name: shown[name].default for name in OPTIONS}
        found = call([], **defaults)
        if inspect.iscoroutine(found):
            found.close()
        else:
            assert found == []
    (out,) = lm.generate(
        [prompt_of(4, 1)], GREEDY, **{name: None for name in OPTIONS if name != "priority"}, priority=0
    )
    assert out.token_ids == lm.generate([prompt_of(4, 1)], GREEDY)[0].token_ids


# -- Tab -------------------------------------------------------------------------------------


@pytest.fixture
def complete(lm_of: Callable[..., LM]) -> Iterator[Callable[[str], set[str]]]:
    """What IPython's own completer has for a line, with `lm` and `out` in its names."""
    shells = pytest.importorskip("IPython.core.interactiveshell", reason='pip install -e ".[notebook]"')
    completer = pytest.importorskip("IPython.core.completer")
    shell = shells.InteractiveShell.instance()
    try:
        lm = lm_of("llama", seed=33)
        set_up_completion(type(lm))  # as a new LM does; this one may have been made for an earlier shell
        (out,) = lm.generate([prompt_of(4, 1)], GREEDY, capture=["resid_post.*"])
        lm.vectors["sea"] = VECTOR
        shell.user_ns |= {"lm": lm, "out": out}

        def found(line: str) -> set[str]:
            with completer.provisionalcompleter():
                return {one.text for one in shell.Completer.completions(line, len(line))}

        yield found
    finally:
        shells.InteractiveShell.clear_instance()


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("lm.model.", {"layers", "norm", "embed_tokens"}),
        ("lm.model.layers[0].", {"self_attn", "mlp", "input_layernorm", "output"}),
        ("lm.model.layers[0].se", {"self_attn"}),
        ("lm.model.layers[-1].self_attn.", {"q_proj", "o_proj"}),
        ("out.activations.", {"stack", "positions", "indexes", "save"}),
        ('out.activations["', {"resid_post.0", "resid_post.1", "resid_post.2"}),
        ("out.activations.positions['resid", {"resid_post.0", "resid_post.1", "resid_post.2"}),
        ("lm.vectors['", {"sea"}),
        ("lm.si", {"sites"}),
    ],
)
@pytest.mark.local
def test_ipython_completes(line: str, wanted: set[str], complete: Callable[[str], set[str]]) -> None:
    assert wanted <= complete(line)


@pytest.mark.local
def test_ipython_completes_nothing_of_what_is_not_there(complete: Callable[[str], set[str]]) -> None:
    assert "self_attn" not in complete("lm.model.layers[99].")
    assert not {"self_attn", "layers"} & complete("(1).")


def test_modules_and_results_list_what_they_have(lm: LM) -> None:
    (out,) = lm.generate([prompt_of(4, 1)], GREEDY, capture=["resid_post.*"])
    assert {"self_attn", "mlp"} <= set(dir(lm.model.layers[0]))
    assert out.activations._ipython_key_completions_() == list(out.activations)


# -- messages --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Steer(5, VECTOR), "Steer: site=5; expected a site's name, such as 'resid_post.5', or a Site"),
        (lambda: Steer("5", VECTOR), r"unknown site '5'; did you mean resid_post.5 or attn_out.5 or mlp_out.5\?"),
        (lambda: Capture(None), "Capture: site=None; expected a site's name"),  # pyright: ignore[reportArgumentType]
        (lambda: SetFeature(None, {1: 2}), "^SetFeature: sae=None; expected an SAE, or a name in lm.saes"),  # pyright: ignore
        (lambda: SetFeature("sea", {}), r"^SetFeature\('sea'\): features={}; expected {feature: value}"),
    ],
)
def test_what_a_spec_cannot_be_made_of_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Steer("resid_post.1", VECTOR, position=3), r"Steer\(\) has no argument 'position': did you mean positions\?"),
        (lambda: Capture("resid_post.1", position=3), r"Capture\(\) has no argument 'position': did you mean positions\?"),
        (lambda: Steer("resid_post.1", VECTOR, coeff=3), "Steer has scale"),
        (lambda: Steer(layer=3, vector=VECTOR), "the site has it: 'resid_post.12'"),
        (lambda: Scale("mlp_out.1", factr=2), r"did you mean factor\?"),
        (lambda: Gate(VECTOR, treshold=1), r"did you mean threshold\?"),
        (lambda: Knockout(1, frm=0), r"did you mean from_\?"),
        (lambda: Features("sea", topk=3), r"did you mean top_k\?"),
        (lambda: Lens(token=[3]), r"did you mean tokens\?"),
    ],
)  # fmt: skip
def test_a_misspelt_argument_of_a_spec_is_answered(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_specs_are_copied_and_pickled() -> None:
    steer = Steer("resid_post.1", VECTOR, scale=2.0)
    assert pickle.loads(pickle.dumps(steer)) == copy.deepcopy(steer) == replace(steer, scale=2.0) == steer


def test_a_model_is_not_pickled_and_its_outputs_are(lm: LM) -> None:
    for call in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match=r"an LM cannot be pickled or copied.*LM.connect\(url\)"):
            call(lm)
    (out,) = lm.generate([prompt_of(4, 1)], GREEDY, capture=["resid_post.*"])
    again = pickle.loads(pickle.dumps(out))
    assert torch.equal(again.activations.stack("resid_post"), out.activations.stack("resid_post"))


# -- other models ----------------------------------------------------------------------------


@pytest.mark.local
def test_an_sae_of_another_model_warns(lm: LM) -> None:
    sae = random_sae(72)
    source = lm.runner.source
    assert source is not None
    for name, other in (("", False), (source.name, False), ("gemma-2-2b", True)):
        named = replace(sae, model_name=name)
        capture = [Capture(str(sae.site), reduce=Features(named, top_k=4))]
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            lm.generate([prompt_of(4, 1)], GREEDY, capture=capture)
        texts = [str(one.message) for one in seen]
        assert bool(texts) == other, texts
        if other:
            assert f"trained on gemma-2-2b, as it says, and this model is {source.name}" in texts[0]


@pytest.mark.parametrize(
    ("recorded", "name", "fits"),
    [
        ("gpt2-small", "openai-community/gpt2", True),
        ("gemma-2-2b", "google/gemma-2-2b-it", True),
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B-Instruct", True),
        ("llama-3-8b", "meta-llama/Meta-Llama-3-8B", True),
        ("gemma-2-2b", "google/gemma-2-9b", False),
        ("pythia-70m", "EleutherAI/pythia-160m", False),
        ("", "anything", True),
    ],
)
def test_recorded_names_are_compared_by_their_letters(recorded: str, name: str, fits: bool) -> None:
    assert fits_name(recorded, [name]) == fits


def test_names_of_features_are_no_part_of_an_sae(lm: LM) -> None:
    sae = random_sae(72)
    named = replace(sae, feature_names={3: "the sea"})
    assert named.feature_names[3] == "the sea" and named.fingerprint == sae.fingerprint
    assert named.to(dtype=torch.float64).feature_names == {3: "the sea"}
