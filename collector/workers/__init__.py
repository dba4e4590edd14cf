"""Workers of the multiprocess collector: started, asked, watched, and replaced.

A worker may end, hang or raise at any instruction. From there on, in this order:

1. `local/processes.py` and `local/threads.py` see its end, which `Link.hear` returns as `Gone`
   (`transport.py`); an exception travels as `Raised` (`messages.py`). A worker that hangs says
   nothing: `pool.py` sees that its board (`collector/slab/progress.py`) does not go on, and ends
   it.
2. `failures.py` makes an error of that, which says what is known: the cause, the lanes, their seeds
   and last actions. `pool.py` notes it in `Member.failed` (`member.py`), and `WorkerPool.events`
   returns it in the place of an answer.
3. The source that asked counts as lost what the worker had executed and not handed over, and cuts
   the trajectories of its lanes: `lockstep.py` in the slots under way (`_mend`, `account`),
   `leases/source.py` in its leases, which `leases/budget.py` gives to others (`lose`).
4. `WorkerStartup.allowed` (`startup/worker_startup.py`) says whether another may take its place,
   by the options in `worker_options.py`; else it raises the error, and the run ends: rows that are
   complete are stored (`collector/batches/run_loop.py`).
5. `WorkerStartup.replace` counts the new worker in the ledger, and with it an incarnation, from
   which its lanes get seeds that none had before; the steps to its readiness are a generator
   (`_getting_ready`): made, called as the one before it was by `env_call` and `env_set`
   (`envs/calls/replay_calls.py`), seeded, checked against the others, given the state of the
   transforms, bound to the memory of the one before it.
6. `startup/worker_startup.py` leads it through these, answer by answer, as the pool hears them.
   Lockstep waits for that (`finish`), for none advances without the others; leases go on with the
   others, and the new worker gets one when it is ready. If it fails in turn, all begins again at 4.

One that fails before the run has begun is replaced with the same seeds (`_start_again`): nothing
was made of them.
"""
