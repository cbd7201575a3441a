"""Hooks of requests: declared interventions, captures and monitors, and traces. In the order of reading:

| module | content |
|---|---|
| `site`, `positions`, `spec` | places in a model, positions of a request, and the fields of all specs |
| `interventions`, `captures`, `monitors` | the specs, and how each is computed. They may name values of `saes` and `vectors` |
| `bind`, `bound_hooks` | specs resolved to a model and a prompt's length, for all equal requests |
| `declarations` | checks and reservations, before a request is scheduled |
| `declared`, `demands` | state of one request: the worker's, and the scheduler's view of it |
| `part_hooks`, `kv_edits` | encoders and vision towers; the KV that requests with edits share |
| `traces` | blocks of Python: `syntax`, `blocks`, `lowering`, `serving` in passes, `saves` |
"""
