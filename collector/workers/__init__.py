"""Workers of the multiprocess collector: starting, asking, supervising and replacing them.

A worker may end, hang or raise at any instruction. The parent then does the following, in order:

1. `local/processes.py` and `local/threads.py` detect that a worker ended, and `Link.hear` returns
   `Gone` (`transport.py`). An exception arrives as an `ExceptionReport` (`messages.py`). A worker
   that hangs sends nothing: `pool.py` detects that its board (`collector/slab/progress.py`) makes
   no progress, and ends it. With Ray, an actor that misses five heartbeats counts as ended
   (`ext/ray/heartbeat.py`).
2. `failures.py` makes an error that reports the cause, the lanes, their seeds and their last
   actions. `pool.py` stores it in `Member.failed` (`member.py`), and `WorkerPool.events` returns
   it instead of an answer.
3. The source that sent the question records the loss, which is all transitions that the worker
   executed but did not deliver. It also cuts the trajectories of its lanes. `lockstep.py` does so
   for the slots in progress (`_mend`, `outcome`). `leases/source.py` does so for the worker's
   leases, which `leases/budget.py` returns to the budget (`lose`). The counts reach the ledger as
   `SlotOutcome.lost` with the next block. In a sharded run `ext/sharded_leases.py` counts them.
4. `WorkerStartup.allowed` (`startup/worker_startup.py`) decides from the options in
   `worker_options.py` whether a replacement may start. Otherwise it raises the error and the run
   ends: complete rows are stored (`collector/batches/run_loop.py`).
5. `WorkerStartup.replace` counts the new worker in the ledger. The count gives the worker a new
   incarnation, from which its lanes get seeds that no lane had before. The generator
   `_getting_ready` yields the steps until the worker is ready: create the environment, replay the
   calls of `env_call` and `env_set` (`Calls` in `envs/calls/serialization.py`), seed it, check it
   against the other workers, restore the state of the transforms, and attach the memory of its
   predecessor.
6. `startup/worker_startup.py` advances that generator by one answer at a time, as the pool
   receives them. Lockstep waits for the end (`finish`), because no worker advances without the
   others. Leases continue with the other workers, and the new worker gets a lease when it is
   ready. If it fails too, the procedure starts again at step 4.

A worker that fails before the run has begun is replaced with the same seeds (`_start_again`),
because no data was made from them.
"""
