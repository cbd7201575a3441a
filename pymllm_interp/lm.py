"""LM: the model that users hold. Generate with it as with vLLM, trace it as with nnsight.

lm = LM("demo")
outs = lm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))

with lm.trace("The Eiffel Tower is in") as tracer:
    h = lm.model.layers[12].output.save()     # [1, tokens, hidden]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from .client.backend import Backend
from .client.calls.activation_cache import NamesFilter
from .client.calls.lm_arguments import check_arguments, check_unused, server_fields, vllm_arguments
from .client.calls.model import ClientModel
from .client.calls.model_weights import LoadedAdapters
from .client.inputs.prefix_kv import kv
from .client.lifecycle.calls import is_paused, is_sleeping, pause, resume, sleep, update_weights, wake
from .client.local_backend import LocalBackend
from .client.notebook.tab_completion import set_up_completion
from .client.pooling.calls import encode
from .client.pooling.scores import classify, score
from .config import EngineTuning, ModelConfig, ServerConfig
from .harvest.corpus_calls import activations, generate_corpus, harvest
from .harvest.on_ray.address import SCHEME, url_of
from .harvest.progress import HarvestResult
from .hooks.captures.spec import Capture
from .hooks.heads import Heads
from .hooks.interventions.knockout import Intervention
from .hooks.monitors.monitor import Monitor
from .hooks.positions import Positions
from .hooks.site import Site
from .hooks.traces.syntax.pass_options import take_options
from .lens.bridge_of import bridge_of
from .toolkit.calls import circuit, das, edge_attribution, logit_attribution, path_patching

if TYPE_CHECKING:
    from .runner.interp_model_runner import InterpModelRunner
    from .toolkit.attribution_result import Attribution
    from .toolkit.sweep_result import PatchSweep
    from .toolkit.verbalize import Readings


class LM(ClientModel):
    """A language model, its engine, and the tree that traces are written against.

    Args:
        model: "demo", a folder (config.json and safetensors), a .gguf file, or a hub id.
        dtype: "auto" is float32 on a CPU and bfloat16 on CUDA.
        device: "auto" is CUDA if available.
        load_format: "dummy" makes seeded random weights; config.json is enough, and no tokenizer is needed.
        impl: "native": this package's implementation. "transformers": the family's own class over the paged KV pool. "auto":
            native, or else transformers (docs/reference/models.md).
        max_model_len: tokens of one request, prompt and new ones. None: as many as the model's positions allow, or fewer if
            the memory gives a smaller KV pool.
        max_running_requests: requests in one step; None derives the number from the KV pool.
        max_num_tokens: token rows in one step; longer prompts run in chunks, traced ones in a separate step.
        kv_cache_tokens: slots of the KV pool.
        seed: seed of dummy weights, and of requests without a seed.
        rename: aliases for modules, as in nnsight.
        envoys: nnsight's map from module classes or paths to envoy classes.
        attn_implementation: "eager" runs traces with transformers' own attention, as if each trace said so.
        hf_config: a transformers config in place of config.json (with load_format="dummy").
        generation_config: "auto": the model's generation_config.json sets `default_sampling_params`; "none": it does not; or a
            folder with another one.
        saes: {name: an `SAE`, a file or a folder}, as `lm.saes` has them. On CUDA, `SetFeature` takes only these top-k SAEs,
            transcoders, and SAEs that normalize their input.
        quantize: "fp8" rounds the weights of linear layers to FP8 at load. "fp8-w8a8" also rounds the inputs of their products
            (docs/engine/quantized.md). None: weights as they are stored.
        backend: an engine that has its model already, in place of all arguments above but `rename`, `envoys` and
            `attn_implementation` (client/backend.py). `connect` makes one of a server.
        engine: "own"; or "vllm", for vLLM with declared hooks (docs/engine/vllm.md). Further keywords are then vLLM's, too.
        tuning: memory and scheduling inside the engine (`pymllm_interp.config.EngineTuning`); it changes no result.
        server: further fields of `ServerConfig`, by name.

    Raises:
        FileNotFoundError, ValueError: no such model, or one that cannot be served; see `models`.
        TypeError: a model that is neither a name nor a path, or a keyword that is not known.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        dtype: Any = "auto",
        device: str = "auto",
        load_format: str = "auto",
        impl: str = "auto",
        max_model_len: int | None = None,
        max_running_requests: int | None = 512,
        max_num_tokens: int | None = None,
        kv_cache_tokens: int | None = None,
        seed: int = 0,
        rename: dict[Any, Any] | None = None,
        envoys: dict[Any, Any] | None = None,
        hf_config: PretrainedConfig | None = None,
        attn_implementation: str | None = None,
        generation_config: str | PathLike[str] = "auto",
        saes: Mapping[str, Any] | None = None,
        quantize: str | None = None,
        backend: Backend | None = None,
        engine: str = "own",
        tuning: EngineTuning | None = None,
        **server: Any,
    ) -> None:
        server = server_fields(server, tuning)
        vllm = vllm_arguments(engine, server)
        check_arguments(model, server)
        self._default_options = take_options({"attn_implementation": attn_implementation})
        model_config = ModelConfig(
            model=str(model), dtype=dtype, load_format=load_format, impl=impl, seed=seed, hf_config=hf_config,
            generation_config=str(generation_config), saes=saes or {}, quantize=quantize,
        )  # fmt: skip
        server_config = ServerConfig(
            device=device, max_model_len=max_model_len, max_running_requests=max_running_requests,
            max_num_tokens=max_num_tokens, kv_cache_tokens=kv_cache_tokens, **server,
        )  # fmt: skip
        if backend is not None:
            check_unused(model_config, server_config)
        made = backend
        try:
            if made is None and vllm is not None:
                from .vllm_engine.client.backend import VllmBackend

                made = VllmBackend(model_config, server_config, vllm)
            if made is None:
                made = LocalBackend(model_config, server_config, wrap=self._tree_maker(rename, envoys))
            super().__init__(made, rename, envoys)
            set_up_completion(type(self))
        except BaseException as error:
            try:
                if made is not None and backend is None:
                    made.engine.shutdown()  # a second Ctrl-C ends this wait; the engine's thread then ends without it
            finally:
                # A notebook keeps the error, which holds this frame and those below.
                self.__dict__.clear()
                made = None
                clear_frames(error.__traceback__)
            raise

    def __repr__(self) -> str:
        """The model, its device and dtype and the engine's state; then the tree of modules."""
        return f"{self._summary()}\n{super().__repr__()}"

    def _summary(self) -> str:
        facts = self.backend.facts
        dtype = str(facts.dtype).removeprefix("torch.")
        return f"LM({facts.name}, {facts.device}, {dtype}, engine: {self.engine.state})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an LM cannot be pickled or copied: it has an engine, with threads and device memory. Make one in each process, or "
            "serve one (pymllm-interp serve) and use LM.connect(url) in each. Outputs and their activations can be pickled"
        )

    @property
    def adapters(self) -> LoadedAdapters:
        """LoRA adapters: name -> folder, with `load` and `unload`."""
        return LoadedAdapters(self.backend, self._check_outside)

    @property
    def is_remote(self) -> bool:
        """Whether the weights are in another process."""
        return not self.backend.in_process

    @property
    def runner(self) -> InterpModelRunner:
        """The model's runner. Raises NotImplementedError if it is in another process."""
        self.backend.require_process("lm.runner")
        backend: Any = self.backend
        return backend.runner

    @property
    def capabilities(self) -> dict[str, Any]:
        """The model, its sites, ops and limits, as JSON; for a server also the permissions of this key."""
        return self.backend.describe()

    _bridge = bridge_of  # for the methods of TransformerLens' caches

    def _model_maker(self) -> Callable[[], LM]:
        """Picklable function that makes an equal model in another process, for workers of harvests."""
        return partial(_worker_model, self.runner.model_config, self.runner.server_config)

    encode, classify, score, kv = encode, classify, score, kv
    pause, resume, is_paused, update_weights = pause, resume, is_paused, update_weights
    sleep, wake, is_sleeping = sleep, wake, is_sleeping

    # -- corpora ----------------------------------------------------------------------------

    def harvest(
        self,
        inputs: Iterable[Any],
        *,
        capture: Sequence[Capture | Site | str],
        out: str | Path,
        interventions: Sequence[Intervention] | None = None,
        monitors: Sequence[Monitor | str] | None = None,
        lora: str | None = None,
        shard_bytes: int = 1 << 29,
        max_length: int | None = None,
        too_long: str = "error",
        on_error: str = "raise",
        progress: bool | None = None,
        cluster: str | None = None,
        workers: int | None = None,
        unit_documents: int = 1024,
        column: str | None = None,
    ) -> HarvestResult:
        """Write the states of a corpus to the folder `out`, as safetensors shards that `open_harvest` reads.

        Each document is one forward pass without generation; many run at once. The same call resumes a run that was killed or
        failed: it skips the documents in whole shards, and deletes all other files of the run.

        Args:
            inputs: an iterable of documents (texts, token ids, or prompts with images), which may be lazy and endless. Or one
                stream of tokens: a tensor [n], an array, an iterable of integers. It is cut into documents of `max_length` tokens.
            capture: sites and `Capture`s. Positions and reductions apply to one pass.
            out: a new folder, or a folder of the same harvest.
            interventions: applied to each document.
            monitors: monitors that record; the shards have the scores of monitor NAME as ``scores.NAME`` [rows] float32.
            lora: a LoRA adapter that each document runs with, by name; None: the model itself.
            shard_bytes: upper bound of a shard, in bytes. A document is never split over shards, so a larger document makes a
                larger shard. About twice this much is held in host memory.
            max_length: upper bound of a pass, in tokens; None: max_model_len.
            too_long: handling of a longer document: "error"; "truncate": read its beginning; "split": read it in several
                passes. Passes have `max_length` tokens, and do not attend to each other. Positions still count from the start
                of the document, so the position in the pass is ``position % max_length``.
            on_error: "raise"; "skip": leave out documents that fail, and name them in the result and the manifest.
            progress: show documents, rates and the time left on standard error: a bar on a terminal, lines elsewhere. None: no
                lines in the first seconds. False: nothing.
            cluster: compute by workers on a Ray cluster (docs/engine/cluster.md): "auto" (of this machine, or of RAY_ADDRESS), or
                its address. `out` is on shared storage. `inputs` may be `Path`s of JSONL or Parquet files, or a `ray.data.Dataset`.
            workers: number of workers, each with its own model; None: one for each GPU, or CPU, of the cluster.
            unit_documents: documents that a worker gets at a time, at most.
            column: column of the files; None: "text", or else "input_ids".

        Raises:
            ValueError: invalid captures, a folder of another harvest or input, or `lora` with `cluster`: workers load no adapters.
            FileExistsError: the folder holds other files.
            HarvestError: the run stopped before the end of the input. The message names the document, and the kept part.
        """
        return harvest(
            self, inputs, out, cluster, workers, unit_documents, column, progress, capture=capture,
            interventions=self._requests.declared({"interventions": interventions, "monitors": monitors}, 1)[0], lora=lora,
            shard_bytes=shard_bytes, max_length=max_length, too_long=too_long, on_error=on_error,
        )  # fmt: skip

    generate_corpus, activations, circuit, das = generate_corpus, activations, circuit, das
    edge_attribution, path_patching, logit_attribution = edge_attribution, path_patching, logit_attribution

    # -- experiments -------------------------------------------------------------------------

    def verbalize(
        self, states: Any, *, template: Any, reader: Any = None, placeholder: str | int = " ?", site: str = "embed",
        norm: Any = None, replace: bool | None = None, max_tokens: int = 64, samples: int = 1, progress: bool | None = None,
        **sampling: Any,
    ) -> Readings:  # fmt: skip
        """Readings of states in words: a template with each state in place of its placeholders, continued by a reader.

        Args:
            states: [n, width], or [n, placeholders, width] for a template with several.
            template: a prompt, or a list of messages.
            reader: a LoRA adapter of this model by name, another `LM`, or None: this model itself.
            placeholder: text of one token, or its id. Its occurrences in the template are the positions.
            site: "embed": states replace embeddings (natural-language autoencoders). A later site, such as "resid_post.1":
                they are added to the stream (activation oracles).
            norm: None: states as they are. A number: rescaled to this length. "match": to that of the embedding or state there.
            replace: whether a later site's state is replaced; None: it is added to.
            max_tokens, samples: new tokens, and readings of each state. Several are sampled at temperature 1, one is greedy.
            progress: see `generate`.
            sampling: further fields of `SamplingParams`.

        Raises:
            PromptError, ValueError: a template without placeholder, or states that the reader cannot take; nothing ran.
        """
        from .toolkit.verbalize import verbalize

        return verbalize(
            self, states, template=template, reader=reader, placeholder=placeholder, site=site, norm=norm, replace=replace,
            max_tokens=max_tokens, samples=samples, progress=progress, sampling=sampling,
        )  # fmt: skip

    def patch_sweep(
        self,
        base: Any,
        source: Any,
        *,
        site: str = "resid_post",
        metric: Any,
        positions: Positions | None = None,
        heads: Heads | str = None,
        layers: Iterable[int] | None = None,
        how: str = "auto",
        stream: bool = False,
        progress: bool | None = None,
        lora: str | None = None,
    ) -> PatchSweep:
        """Activation patching at every layer and position: the base prompt, each time with one state of the source prompt.

        Each cell is the run of one `Patch`. Native families run all cells as one growing pass (docs/guides/toolkit.md), others as
        requests.

        Args:
            base, source: prompts with equally many tokens.
            site: a kind of site (`resid_pre`, `resid_mid`, `resid_post`, `attn_out`, `mlp_out`, `mlp_act`, `q`, `k`, `v`, `z`), or
                a pattern with layers.
            metric: metric of the last position's logits. Two tokens: the difference of their logits. One token: its log
                probability. Or a function of float32 logits [rows, vocab] that returns [rows]. A token is an id, or text.
            positions: positions of the prompts; None: all. The result has them in ascending order.
            heads: heads to patch one by one at `q`, `k`, `v` and `z`; "all"; or None, for whole states.
            layers: some layers; None: all.
            how: "wavefront", "requests", or "auto": the wavefront if supported.
            stream: return after the two unpatched runs. Iterating over the result runs the cells.
            progress: show a bar of the cells; None: in notebooks and on terminals, above two seconds.
            lora: the adapter of all runs, which are requests then.

        Returns:
            a `PatchSweep`: `values` [layers, positions], or [layers, positions, heads].

        Raises:
            PromptError, ValueError: prompts of different lengths, or an invalid metric, site, layer, position or head;
                nothing was scheduled.
            NotImplementedError: a model with edits, or `how` is "wavefront" without support for it.
        """
        from .toolkit.sweep import patch_sweep

        self._check_outside()
        return patch_sweep(
            self, base, source, site=site, metric=metric, positions=positions, heads=heads, layers=layers, how=how, stream=stream,
            progress=progress, lora=lora,
        )  # fmt: skip

    def attribute(
        self,
        clean: Any,
        corrupted: Any,
        *,
        metric: Any,
        sites: NamesFilter,
        steps: int = 1,
        neurons: bool = False,
        progress: bool | None = None,
        lora: str | None = None,
    ) -> Attribution:
        """Attribution patching: estimates the change of the corrupted run's metric by patching each site from the clean run.

        One step is ``(clean - corrupted) * gradient`` with the corrupted run's gradients, and one pass serves all sites. More
        steps are integrated gradients: each site has separate passes, with states between both runs in its place. Their sum
        is the effect of patching the whole site; the result's `completeness` compares the two.

        Args:
            clean, corrupted: prompts with equally many tokens.
            metric: see `patch_sweep`; a function must be differentiable.
            sites: a site's name or pattern, or several, of all kinds but `logits`.
            steps: gradients to average, at the middle of equal parts of the way.
            neurons: keep the width of each state, in place of sums over positions and heads.
            progress: show a bar of the sites; None: in notebooks and on terminals, above two seconds.
            lora: the adapter of both runs.

        Returns:
            an `Attribution`: by site, [positions]; at `q`, `k`, `v` and `z` [positions, heads].

        Raises:
            PromptError, ValueError: prompts of different lengths, or an invalid metric, site or number of steps; nothing was
                scheduled.
            NotImplementedError: a model with edits, or a server's.
        """
        from .toolkit.attribution import attribute

        self.backend.require_process("lm.attribute", "lm.patch_sweep runs here, as requests")
        self._check_outside()
        return attribute(
            self, clean, corrupted, metric=metric, sites=sites, steps=steps, neurons=neurons, progress=progress, lora=lora
        )  # fmt: skip

    def _check_outside(self) -> None:
        self.engine.check_open()
        if self.engine.on_engine_thread:
            raise RuntimeError("this cannot run inside the block of a trace: the engine would wait for itself")

    def reset_prefix_cache(self, reset_connector: bool = False) -> None:
        """Forget the KV that the prefix cache keeps in the pool. Edits of the weights do so by themselves.

        Args:
            reset_connector: also forget this model's KV, by its weights as they are now, in `kv_spill_bytes` and `kv_spill_folder`.
        """
        self.engine.reset_prefix_cache(reset_connector)

    @classmethod
    def connect(
        cls, url: str, *, api_key: str | None = None, timeout: float | None = None, lower_traces: str = "auto"
    ) -> LM:
        """The model that a server (`pymllm-interp serve`) runs, with the calls of a local `LM`.

        Outputs equal a local `LM`'s. A trace is a declared request, if its block can run afterwards; the block runs here.
        Other blocks are sent to the server as source code, with the values that they read. They need a key with the right
        `code`; their saves come back as tensors. `lm.lm_head(h)` works only inside blocks.

        Args:
            url: such as "http://127.0.0.1:8000"; or "ray:NAME", the name of a cluster on Ray (`pymllm-interp cluster`).
            api_key: key, if the server requires one.
            timeout: seconds to wait for the next part of an answer; None: as long as it takes.
            lower_traces: "auto"; "require" sends no code, and refuses blocks that need it; "off" sends each block as code.

        Raises:
            ValueError: an unknown `lower_traces`.
            ConnectionError: no server answers there, or it serves another version.
            PermissionError: the key is missing or not known.
            ImportError: "ray:NAME", and Ray is missing.
        """
        from .client.remote.remote_backend import RemoteBackend

        if url.startswith(SCHEME):
            url = url_of(url)
        return cls(backend=RemoteBackend(url, api_key, timeout, lower_traces))

    @classmethod
    def attach(cls, llm: Any) -> LM:
        """An LM over a `vllm.LLM` of this process (docs/engine/vllm.md#attach). Both take requests, until `shutdown`."""
        from .vllm_engine.client.backend import VllmBackend

        return cls(backend=VllmBackend.of_llm(llm))

    def shutdown(self, timeout: float | None = None) -> None:
        """End all requests, and release all but the weights. They are freed with the last reference (`del lm`).

        A server keeps running; its connection is closed. A second call does nothing.

        Args:
            timeout: seconds to wait for the end; None: as long as it takes. A block that waits for a lock may take for ever.

        Raises:
            TimeoutError: it takes longer. The engine ends later.
        """
        if (backend := self.__dict__.get("backend")) is not None:
            backend.engine.shutdown(timeout)

    def __enter__(self) -> LM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


def _worker_model(model: ModelConfig, server: ServerConfig) -> LM:
    """The model of a harvest's worker, in another process."""
    return LM(backend=LocalBackend(model, server))
