"""Public names: what the package and `LM` show, and old names that work for one more version."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import pymllm_interp
from pymllm_interp import LM, SamplingParams
from pymllm_interp.cli import make_parser
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.client.calls.model import RENAMED
from pymllm_interp.config import ServerConfig
from pymllm_interp.server.command import settings_of


def test_dir_of_the_package_is_its_public_names() -> None:
    import pymllm_interp.lm  # a submodule that was imported is no public name

    assert pymllm_interp.__all__ == [
        "LM", "SAE", "Ablate", "Activations", "Capture", "Clamp", "Gate", "Patch", "RequestOutput", "SamplingParams", "Scale",
        "Steer",
    ]  # fmt: skip
    assert set(dir(pymllm_interp)) == {*pymllm_interp.__all__, "__version__"}
    assert all(hasattr(pymllm_interp, name) for name in dir(pymllm_interp))


@pytest.mark.parametrize("name", sorted(pymllm_interp._MOVED))
def test_a_name_that_moved_works_and_names_its_home_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = f"pymllm_interp.{pymllm_interp._MOVED[name]}"
    monkeypatch.delitem(vars(pymllm_interp), name, raising=False)
    with pytest.warns(
        DeprecationWarning, match=rf"0\.2 removes pymllm_interp\.{name}: use from {home} import {name}$"
    ) as found:
        exec(f"from pymllm_interp import {name}")
    assert len(found) == 1 and found[0].filename == "<string>"  # the caller's line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(pymllm_interp, name) is getattr(import_module(home), name)
    monkeypatch.delitem(vars(pymllm_interp), name)


@pytest.mark.parametrize("home", ["pymllm_interp", "pymllm_interp.harvest", "pymllm_interp.runner"])
def test_a_wrong_name_is_told_the_closest_one(home: str) -> None:
    module = import_module(home)
    with pytest.raises(AttributeError, match=f"no attribute '{module.__all__[0]}e'; did you mean {module.__all__[0]}?"):
        getattr(module, module.__all__[0] + "e")
    assert not hasattr(module, module.__all__[0] + "e")
    with pytest.raises(ImportError, match=f"cannot import name .* from '{home}'; did you mean {module.__all__[0]}?"):
        exec(f"from {home} import {module.__all__[0]}e")
    with pytest.raises(AttributeError, match=f"no attribute 'zzzz'; it has .*{module.__all__[-1]}"):
        module.zzzz  # noqa: B018


def test_a_name_of_a_subpackage_is_told_its_home() -> None:
    with pytest.raises(
        ImportError, match=r"'Monitor' from 'pymllm_interp'; Monitor is in pymllm_interp\.interventions"
    ):
        exec("from pymllm_interp import Monitor")
    for name, home in pymllm_interp._ELSEWHERE.items():
        assert hasattr(import_module(f"pymllm_interp.{home}"), name)


LM_NAMES = """
generate generate_with_lens agenerate chat stream astream submit imap sweep forward run_with_cache run_with_hooks
trace scan pipe session explain edit clear_edits logits samples input inputs output
token_ids to_tokens to_string to_str_tokens to_single_token
encode classify score kv harvest activations generate_corpus patch_sweep attribute circuit verbalize
edge_attribution path_patching logit_attribution das
vectors saes adapters weights default_sampling_params
cfg dtype model_spec num_layers hidden_size num_heads vocab_size sites limits capabilities
engine runner is_remote connect attach reset_prefix_cache shutdown
pause resume is_paused update_weights sleep wake is_sleeping
"""


def test_the_names_of_an_lm_are_a_decision() -> None:
    """Of our classes: nnsight's own names of its `Envoy` are nnsight's."""
    ours = [cls for cls in LM.__mro__ if cls.__module__.startswith("pymllm_interp.")]
    names = {name for cls in ours for name in vars(cls) if not name.startswith("_")}
    assert names == set(LM_NAMES.split())
    assert not names & RENAMED.keys()


def test_an_old_name_of_an_lm_works_and_names_the_new_one(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    found = {}
    for name in RENAMED:
        with pytest.warns(DeprecationWarning, match=rf"0\.2 removes lm\.{name}: use ") as warned:
            found[name] = getattr(lm, name)
        assert len(warned) == 1 and warned[0].filename == __file__
    assert found["model_fingerprint"] == lm.weights.fingerprint == found["fingerprint_with"](None)
    assert found["weights_version"] == lm.weights.version and found["engine_name"] == lm.backend.facts.engine_name
    assert found["head_dim"] == lm.cfg.d_head and found["max_model_len"] == lm.limits.max_model_len
    captures, interventions = found["resolve_specs"](["resid_post.1"])
    handle = found["submit_prefill"]([1, 2], captures, interventions)
    (out,) = lm.generate([[1, 2]], SamplingParams(max_tokens=0), capture=["resid_post.1"])
    assert torch.equal(handle.result().activations["resid_post.1"], out.activations["resid_post.1"])
    with pytest.raises(ValueError, match="has no adapter_config"):
        found["load_adapter"]("a", "/nowhere")
    with pytest.raises(ValueError, match="there is no adapter 'a'"):
        found["unload_adapter"]("a")
    with pytest.raises(AttributeError, match=r"did you mean lm\.generate"):
        lm.generat  # noqa: B018


@pytest.mark.parametrize(
    ("given", "new", "field", "value"),
    [
        (
            {"schedule_policy": "prefill_first"},
            r"LM\(tuning=EngineTuning\(prefill_policy=",
            "prefill_policy",
            "prefill_first",
        ),
        ({"max_segments": 9}, r"LM\(tuning=EngineTuning\(max_segments=", "max_segments", 9),
        ({"scheduling_policy": "lpm"}, r"LM\(queue_order=", "queue_order", "lpm"),
    ],
)
def test_an_old_setting_works_and_names_the_new_one(
    given: dict[str, Any], new: str, field: str, value: Any, model_folder: Callable[[str], Path]
) -> None:
    (old,) = given
    how = {"device": "cpu", "dtype": "float32", "kv_cache_tokens": 64}
    with pytest.warns(DeprecationWarning, match=rf"0\.2 removes LM\({old}=\.\.\.\): use {new}") as warned:
        lm = LM(model_folder("llama"), **how, **given)
    with lm:
        assert len(warned) == 1 and warned[0].filename == __file__
        assert getattr(lm.runner.server_config, field) == value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with LM(model_folder("llama"), **how, **with_tuning(**{field: value})) as lm:
            assert getattr(lm.runner.server_config, field) == value


def test_an_old_option_of_a_server_names_the_new_one() -> None:
    args = make_parser().parse_args(
        ["serve", "demo", "--option", "scheduling_policy=lpm", "--option", "max_segments=9"]
    )
    with pytest.warns(
        DeprecationWarning, match="removes --option scheduling_policy: use --option queue_order"
    ) as warned:
        server = settings_of(args).server
    assert len(warned) == 1 and server["queue_order"] == "lpm" and server["max_segments"] == 9


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"schedule_polcy": "lpm"}, "did you mean"),
        ({"queue_ordr": "lpm"}, r"did you mean queue_order\?$"),
        ({"max_segmnts": 9}, r"did you mean max_segments\? here it is tuning=EngineTuning\(max_segments="),
        ({"trust_remote_code": True}, "code of a model's folder is not run"),
        ({"revision": "main"}, r"huggingface_hub\.snapshot_download"),
        ({"enforce_eagr": True}, r"did you mean enforce_eager\? here it is disable_cuda_graph=True"),
        ({"tuning": {"max_segments": 9}}, r"tuning is a dict: pymllm_interp\.config\.EngineTuning"),
        ({"tuning": ServerConfig(max_num_tokens=9)}, r"tuning is a ServerConfig: pymllm_interp\.config\.EngineTuning"),
    ],
)
def test_a_wrong_setting_is_told_the_closest_one(given: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        LM("demo", **given)


def test_the_homes_wait_for_torch_and_hooks() -> None:
    """The plain runner loads no hooks, and readers of a harvest choose torch's threads before its import."""
    script = (
        "import sys, pymllm_interp.harvest, pymllm_interp.runner; assert 'torch' not in sys.modules\n"
        "from pymllm_interp.runner import ModelRunner; assert not [n for n in sys.modules if n.startswith('pymllm_interp.hooks')]"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
