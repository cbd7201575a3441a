"""A differential fuzz over the public API: random jobs under pressure, each compared with a run by itself.

`jobs.py` and `traces.py` have the kinds of jobs, `world.py` their interventions and captures, `engines.py` the families and the
ways to run hooks, `driver.py` the threads, `results.py` the comparison.

Faults were put back one at a time, and `test_fuzz.py` was run with its seeds until one failed:

| fault | reported |
|---|---|
| captured rows counted by `kv_len`, and requests preempted that await their token | seed 2: a forward pass without logits |
| persistent buffers outside of the fingerprint | seed 7: the model is as before, and was edited |
| an SAE keeps its fingerprint after an edit in place | seed 0: the SAE is as before, and was edited |
| specs keep what they read of an SAE before an edit | seed 0: tokens of a request with that spec |
| `min_p` after `top_p` | seed 0: a sampled token that transformers' filters drop |
| a SystemExit of a done callback, or of `on_step`, ends the engine | seed 0: "it takes no more requests" |
| no request ends while a block waits for a lock | seed 0: a request with a time limit still runs |
| engines may wait for each other | seed 0: a block that waits for another engine returns |
| no gradients by transformers' classes | seed 7: the tensor does not require grad |
| a swapped trace comes back without the KV of a layer | seed 0: values of a trace |

Preempting requests that await their token, by itself, changes no result, nor does a swapped trace that stops admissions:
`test_scheduler.py` has these two. Whether the first fault is met depends on the threads.
"""
