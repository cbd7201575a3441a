"""Hooks of requests: declared interventions, captures and monitors, and traces. To be read in this order::

site, positions, spec              places in a model, positions of a request, fields that all specs have
interventions, captures, monitors  the specs, and how each is computed; `saes` and `vectors` are what they name
bind, bound_hooks                  specs resolved to a model and to a prompt's length, which equal requests share
declarations                       checks and reservations, before a request is scheduled
declared, demands                  the state of one request: the worker's own, and the scheduler's view of it
part_hooks, kv_edits               encoders and vision towers; the KV that an edited request may share
traces                             blocks of Python: `syntax`, `blocks`, `lowering`, `serving` in passes, `saves`
"""
