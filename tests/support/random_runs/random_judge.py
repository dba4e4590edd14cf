"""Check each row and each count of a run against the journals of its lanes.

`judge` returns a list of faults, one line each. The list is empty if everything is right.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from random_faults import faults_of_error
from random_several import check_several
from tensordict import TensorDictBase

from tallyroll.collector import CollectorError, split_trajectories
from tallyroll.collector.errors import EnvironmentRefused, StateError
from tallyroll.storage import StorageError, verify

from random_configurations import Configuration, refusals
from random_copies import wrong_in_copy
from random_devices import on_host
from random_lanes import Injected
from random_networks import wanted_after
from random_notes import wrong_with_notes
from random_policies import extra_of
from random_reading import wrong_in_reading
from random_recurrence import wrong_in_recurrence
from random_rows import Made, Rows, Verdict, compare_lane, equal, made_by, may_skip
from random_running import was_told
from random_runs import RING, Outcome, Run, count_of, flat, restored
from random_spaces import Array, Key, acted, numbers_of

SELF_RESETS_SEEN = 16
"""Number of ends that suffice to detect that an environment resets itself."""


def judge(config: Configuration, outcome: Outcome) -> list[str]:
    """Return all faults in the outcome of a configuration."""
    verdict = Verdict()
    if config.env.shared:
        _shared(outcome, verdict)
        return verdict.found
    _errors(config, outcome, verdict)
    for run in outcome.runs:
        refused = isinstance(run.error, StateError)
        verdict(refused or not run.stepped, f"a lane was stepped, and it ended with {run.error!r}")
        for batch, copy in zip(run.batches, run.copies, strict=True):
            devices = {leaf.device for leaf in batch.values(True, True)}
            verdict(len(devices) <= 1, f"columns of a batch are on {devices}")
            meddled = "batch" in config.meddles
            verdict(meddled or _same(on_host(batch), copy), "a batch changed after it was yielded")
            _batch(config, copy, verdict)
    _sizes(config, outcome, verdict)
    whole = _by_run(config, outcome, verdict)
    for run, rows in zip(outcome.runs, whole, strict=True):
        if run.number and (config.phase == "resume" or outcome.runs[0].ended_by_interrupt):
            before = whole[0]["collector", "policy_version"] if len(whole[0]) else np.zeros(0)
            run.first_version = int(before.max(initial=-1)) + 1
        _run(config, outcome, run, rows, verdict)
    for earlier, later in pairwise(each["collector", "traj_ids"] for each in whole if len(each)):
        together = set(earlier.tolist()) & set(later.tolist())
        verdict(not together, f"{len(together)} ids were used by two runs")
        in_order = config.phase == "in turn" or earlier.max() < later.min()
        verdict(in_order, "a later run has smaller ids")
    _random_frames(config, outcome, whole, verdict)
    _split(outcome, verdict)
    for path in outcome.paths:
        if path.exists():
            let_pass = config.env.lane.spoil == "nan" and config.validate != "raise"
            skip = ["nan"] if let_pass else []
            # Each of several runs may have too few ends, while together they have enough.
            skip += ["finals"] if config.env.lane.self_reset and len(outcome.runs) > 1 else []
            report = verify(path, skip=skip)
            verdict(report.sound, f"verify: {[str(each) for each in report.findings]}")
    for each in outcome.found:
        verdict(False, each)
    _other_uses(config, outcome, verdict)
    return verdict.found


def _other_uses(config: Configuration, outcome: Outcome, verdict: Verdict) -> None:
    """Check the uses of the rows by other storages and readers."""
    if outcome.error is not None:
        return
    there = [path for path in outcome.paths if path.exists()]
    for path, stored in zip(there, outcome.stored, strict=True):
        if not len(stored):
            continue
        if config.reads:
            for each in wrong_in_reading(path, stored, config.number):
                verdict(False, each)
        if config.notes:
            for each in wrong_with_notes(path, stored):
                verdict(False, each)
        if config.copy:
            place = path.parent / f"copy of {path.stem}"
            wrong = wrong_in_copy(path, stored, config.copy, config.copy_by, place)
            for each in wrong:
                verdict(False, each)


def differences(outcome: Outcome, other: Outcome) -> list[str]:
    """Return the differences between the yielded data of two runs that must be the same."""
    verdict = Verdict()
    if outcome.error is not None or other.error is not None:
        return []
    mine, theirs = outcome.runs[0].copies, other.runs[0].copies
    if not verdict(len(mine) == len(theirs), "its twin has another number of batches"):
        return verdict.found
    for number, (one, another) in enumerate(zip(mine, theirs, strict=True)):
        left, right = (dict(td.items(True, True)) for td in (one, another))
        verdict(left.keys() >= right.keys(), "its twin has other columns")
        for key in left.keys() & right.keys():
            same = left[key].numpy().tobytes() == right[key].numpy().tobytes()
            verdict(same, f"its twin has another {key} in batch {number}")
    return verdict.found


def other_rows(outcome: Outcome, other: Outcome) -> list[str]:
    """Compare the stored rows and counts with those of a run that a different exception ended."""
    verdict = Verdict()
    for mine, theirs in zip(outcome.runs, other.runs, strict=True):
        both = f"{type(mine.error).__name__} and {type(theirs.error).__name__}"
        verdict((mine.error is None) is (theirs.error is None), f"ended by {both}")
        verdict(mine.counts == theirs.counts, f"{mine.counts}, and {theirs.counts} after {both}")
        verdict(mine.rows == theirs.rows, f"{mine.rows} rows, and {theirs.rows} after {both}")
    for mine, theirs in zip(outcome.stored, other.stored, strict=True):
        same = len(mine) == len(theirs) and all(
            mine[key].numpy().tobytes() == theirs[key].numpy().tobytes()
            for key in mine.keys(True, True)
        )
        verdict(same, f"other rows are stored: {len(mine)} and {len(theirs)}")
    return verdict.found


def _shared(outcome: Outcome, verdict: Verdict) -> None:
    """Check that lanes that share an object are refused before any row exists."""
    refused = isinstance(outcome.error, EnvironmentRefused)
    verdict(refused, f"lanes share an object, and it ended with {outcome.error!r}")
    rows = sum(run.rows for run in outcome.runs) + sum(map(len, outcome.stored))
    verdict(not rows, f"lanes share an object, and there are {rows} rows")


# --- errors ---------------------------------------------------------------------------------------


def _errors(config: Configuration, outcome: Outcome, verdict: Verdict) -> None:
    for run in outcome.runs:
        if run.error is None:
            continue
        what = f"run {run.number}: {type(run.error).__name__}: {run.error}"
        reasons = refusals(config)
        if config.fault is not None:
            for each in faults_of_error(config.fault, run.error):
                verdict(False, each)
        if isinstance(run.error, Injected):
            raises = {"the policy raises", "user code raises"} & {*reasons}
            verdict(config.env.lane.spoil or raises, what)
        else:
            ours = isinstance(run.error, (CollectorError, StorageError))
            verdict(ours or _is_theirs(run.error), f"no error of ours: {what}")
            verdict(reasons, f"refused without a reason: {what}")


def _is_theirs(error: BaseException) -> bool:
    """Return whether the environment raised the error itself, and not our code called by it."""
    trace, theirs = error.__traceback__, False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "tallyroll" in file and "random_" not in file:
            theirs = False
        elif any(name in file for name in ("gymnasium", "torchrl", "tensordict", "random_env")):
            theirs = True
        trace = trace.tb_next
    return theirs


# --- batches --------------------------------------------------------------------------------------


def _same(one: TensorDictBase, other: TensorDictBase) -> bool:
    mine, theirs = (dict(td.items(True, True)) for td in (one, other))
    return mine.keys() == theirs.keys() and all(
        mine[key].numpy().tobytes() == theirs[key].numpy().tobytes() for key in mine
    )


def _batch(config: Configuration, batch: TensorDictBase, verdict: Verdict) -> None:
    """Check a batch on its own: its shape and its cuts."""
    rows = flat(batch)
    cut = rows["collector", "cut"]
    ids = rows["collector", "traj_ids"]
    done = rows["next", "done"].reshape(len(rows))
    ended = (rows["next", "terminated"] | rows["next", "truncated"]).reshape(len(rows))
    last = torch.ones(len(rows), dtype=torch.bool)
    last[:-1] = ids[1:] != ids[:-1]
    verdict(torch.equal(cut, last & ~ended), "cut is not where trajectories go on")
    verdict(torch.equal(done, ended | cut), "done is not where trajectories end or are cut")
    if "init" in config.env.transforms:
        begun = rows["is_init"].reshape(len(rows))
        verdict(torch.equal(begun, last.roll(1)), "is_init is not where trajectories begin")
    _recurrence(config, batch, rows, verdict)
    agents = config.env.lane.agents
    if agents:
        nested = rows["next", "agents", "done"].reshape(len(rows), agents)
        ends = nested | ~done[:, None] if config.env.lane.joins else nested == done[:, None]
        verdict(bool(ends.all()), "the agents' done is not the root's")
        wanted = [*batch.batch_size, agents]
        for inner in (batch["agents"], batch["next", "agents"]):
            got = list(inner.batch_size)
            verdict(got == wanted, f"batch size of agents: {got}, not {wanted}")


def _recurrence(
    config: Configuration, batch: TensorDictBase, rows: TensorDictBase, verdict: Verdict
) -> None:
    policy = config.policy
    if policy is None or not policy.recurrent or config.postproc:
        return
    if bool((rows["collector", "policy_version"] >= 0).all()):
        for each in wrong_in_recurrence(batch, rows, lstm=policy.lstm):
            verdict(False, each)


def _split(outcome: Outcome, verdict: Verdict) -> None:
    """Check that a run's batches split into trajectories with consecutive steps."""
    for run in outcome.runs:
        if not run.copies:
            continue
        count = 0
        for each in split_trajectories(
            torch.cat([flat(batch) for batch in run.copies]), out="list"
        ):
            of, count = each["collector"], count + len(each)
            verdict(bool((of["traj_ids"] == of["traj_ids"][0]).all()), "split: two ids")
            verdict(bool((of["step"].diff() == 1).all()), "split: steps do not follow")
            verdict(bool(each["next", "done"][-1].all()), "split: the last row is not done")
        verdict(count == run.rows, f"split: {count} rows, not {run.rows}")


def _sizes(config: Configuration, outcome: Outcome, verdict: Verdict) -> None:
    runs, size = outcome.runs, config.frames_per_batch
    for run in [run for run in runs if not (run.interrupted or config.collects)]:
        sizes = [count_of(batch) for batch in run.copies]
        if not sizes:
            continue
        full = all(each == size for each in sizes[:-1]) and 0 < sizes[-1] <= size
        verdict(full, f"sizes of batches: {sizes}")
    if outcome.error is not None:
        return
    total = config.total_frames
    if total is None or config.phase == "stop":  # the stop may come late
        return
    if config.phase == "in turn":
        rows = [run.rows for run in runs]
        verdict(rows == [total, total], f"{rows} rows, {total} were asked for of each")
        return
    if runs[-1].ended_by_interrupt:
        return
    counted = runs[-1:] if config.phase == "append" else runs
    left_early = config.phase in ("resume", "state", "append") and len(runs) == 1
    if not left_early:
        got = sum(run.rows for run in counted)
        verdict(got == total, f"{got} rows, {total} were asked for")


# --- rows per run ---------------------------------------------------------------------------------


def _as_rows(batches: list[TensorDictBase], numbers: list[int]) -> Rows:
    columns: dict[Key, list[Array]] = {}
    for batch in batches:
        for key, leaf in batch.items(True, True):
            own = (key,) if isinstance(key, str) else tuple(key)
            columns.setdefault(own, []).append(leaf.numpy())
    of_batch = [np.full(len(b), number) for b, number in zip(batches, numbers, strict=True)]
    none = np.zeros(0, np.int64)
    return Rows(
        {key: np.concatenate(parts) for key, parts in columns.items()},
        np.concatenate([none, *of_batch]),
    )


def _by_run(config: Configuration, outcome: Outcome, verdict: Verdict) -> list[Rows]:
    """Return the rows of each run: the stored rows, or the yielded ones."""
    yielded = [
        _as_rows([restored(b) for b in run.copies], list(range(len(run.copies))))
        for run in outcome.runs
    ]
    stored = [_as_rows([td], [0]) for td in outcome.stored]
    if outcome.buffer is not None and len(yielded) == 1 and outcome.error is None:
        _compare(_as_rows([outcome.buffer], [0]), yielded[0], "the buffer", verdict)
    if not stored:
        return yielded
    if config.sink == "ring":
        held, rows = stored[-1], yielded[-1]
        if outcome.error is None:
            tail = rows.take(np.arange(len(rows))[-len(held) :])
            verdict(len(held) == min(RING, len(rows)), f"the ring holds {len(held)}")
            _compare(held, tail, "the ring", verdict)
        return yielded
    if config.phase == "in turn":
        parts = _by_turns(stored[0], outcome, verdict)
    elif len(stored) == len(yielded):
        parts = stored
    else:
        parts, first = [], 0
        for run in yielded:
            last = run is yielded[-1]
            stop = len(stored[0]) if last else first + len(run)
            parts.append(stored[0].take(np.arange(first, stop)))
            first += len(run)
    out = []
    for part, mine, run in zip(parts, yielded, outcome.runs, strict=True):
        more = len(part) - len(mine)
        if config.collects:
            part = _in_order_of(run, part)
        ended = run.error is not None or run.ended_by_interrupt
        verdict(more == 0 or (ended and more > 0), f"{more} rows more are stored")
        if more >= 0:
            head = part.take(np.arange(len(mine)))
            _compare(head, mine, "the storage", verdict)
        number = np.concatenate([mine.batch, np.full(max(more, 0), len(run.copies))])
        out.append(Rows(part.columns, number[: len(part)]))
    return out


def _in_order_of(run: Run, stored: Rows) -> Rows:
    """Sort rows that calls stored slot by slot, lane by lane within each call."""
    calls = np.repeat(np.arange(len(run.copies)), [count_of(copy) for copy in run.copies])
    behind = np.full(max(0, len(stored) - len(calls)), len(run.copies))
    keys = [stored["collector", name] for name in ("step", "traj_ids", "lane")]
    return stored.take(np.lexsort([*keys, np.append(calls, behind)[: len(stored)]]))


def _by_turns(stored: Rows, outcome: Outcome, verdict: Verdict) -> list[Rows]:
    """Split the rows that two runs stored in turn, run by run."""
    owner = [number for number, rows in outcome.turns for _ in range(rows)]
    failed = next((run.number for run in outcome.runs if run.error is not None), 0)
    owner += [failed] * (len(stored) - len(owner))
    verdict(len(owner) == len(stored), f"{len(stored)} rows are stored, not {len(owner)}")
    of = np.array(owner[: len(stored)], np.int64)
    return [stored.take(np.flatnonzero(of == run.number)) for run in outcome.runs]


def _compare(held: Rows, mine: Rows, what: str, verdict: Verdict) -> None:
    if not verdict(len(held) == len(mine), f"{what} has {len(held)} rows, not {len(mine)}"):
        return
    if not len(mine):
        return
    missing = mine.columns.keys() - held.columns.keys()
    verdict(not missing, f"{what} lacks {sorted(missing)}")
    for key in mine.columns.keys() & held.columns.keys():
        if key == ("is_init",) and mine[key].dtype == np.bool_:
            # After discarded rows, the first row begins a trajectory, not an episode.
            verdict(not (held[key] & ~mine[key]).any(), f"{what} has another is_init")
            continue
        same = held[key].dtype == mine[key].dtype and held[key].tobytes() == mine[key].tobytes()
        verdict(same, f"{what} has another {key} than was yielded")


# --- a run ----------------------------------------------------------------------------------------


def _run(config: Configuration, outcome: Outcome, run: Run, rows: Rows, verdict: Verdict) -> None:
    placed: list[tuple[list[int], list[Made]]] = []
    executed: int | None = 0
    for lane in range(config.env.lanes):
        at = np.flatnonzero(rows["collector", "lane"] == lane) if len(rows) else np.zeros(0, int)
        mine = rows.take(at) if len(rows) else rows
        tries = []
        for events in outcome.journals.get((run.number, lane), []):
            trial = Verdict()
            made = list(made_by(events))
            where = compare_lane(config, mine, made, trial, lane) if len(mine) else []
            tries.append((len(trial.found), trial, made, where))
        if not tries:
            verdict(not len(mine), f"lane {lane}: rows, and it was never stepped")
            placed.append(([], []))
            continue
        _, trial, made, where = min(tries, key=lambda each: each[0])
        for each in trial.found:
            verdict(False, f"run {run.number}, lane {lane}: {each}")
        # Lanes that never received an action have only journals of trials on copies. This happens
        # to lanes of workers, and to a collector that had no turn before the other one failed.
        no_turn = config.phase == "in turn" and not run.counts.get("slots")
        never_asked = (config.mode == "async" or no_turn) and not len(mine)
        executed = None if executed is None or never_asked else executed + len(made)
        placed.append((where, made))
    if len(rows):
        _bookkeeping(config, rows, verdict)
        _policy(config, run, rows, verdict)
        _flags(config, outcome, rows, verdict)
    _ledger(config, outcome, run, rows, executed, verdict)
    if run.error is None and not verdict.found:
        _order(config, outcome, run, placed, verdict)


# --- over all lanes -------------------------------------------------------------------------------


def _bookkeeping(config: Configuration, rows: Rows, verdict: Verdict) -> None:
    lane, ids = rows["collector", "lane"], rows["collector", "traj_ids"]
    dtypes = {"lane": np.int32, "traj_ids": np.int64, "step": np.int64, "policy_version": np.int64}
    for name, dtype in dtypes.items():
        verdict(rows["collector", name].dtype == dtype, f"{name} has another dtype")
    pairs = {(int(a), int(b)) for a, b in zip(ids, lane, strict=True)}
    verdict(len({id for id, _ in pairs}) == len(pairs), "an id belongs to two lanes")
    verdict(set(lane.tolist()) <= set(range(config.env.lanes)), "a lane that is none")


def _policy(config: Configuration, run: Run, rows: Rows, verdict: Verdict) -> None:
    """Check that actions and columns are the policy's results for the row's own observation."""
    policy = config.policy
    version = rows["collector", "policy_version"]
    if policy is None or (config.several is not None and all(config.several.random)):
        verdict.rows(version == -1, rows, "random actions of another version than -1")
        return
    _versions(config, run, rows, verdict)
    chosen = version != -1
    extra = [name for name in policy.extra if name not in config.env.lane.names]
    for name in extra:
        key: Key = ("deep", "down", "told") if name == "deep" else (name,)
        if verdict(key in rows.columns, f"column {key} is missing"):
            zero = ~rows[key].reshape(len(rows), -1).any(-1)
            verdict.rows(zero | chosen, rows, f"{key} is not 0 where actions are random")
    if policy.recurrent or policy.habit in ("keeps", "keeps td") or not chosen.any():
        return
    mine = rows.take(np.flatnonzero(chosen))
    if policy.network:
        _network(config, run, mine, verdict)
        return
    numbers = numbers_of([mine[key] for key in config.policy_keys])
    masks = mine["action_mask",] if config.env.lane.masked else None
    wanted = acted(config.env.lane.action_space(), numbers, masks)
    action = mine[config.own_column("action")]
    verdict.rows(equal(action, wanted), mine, "the policy does not act so on this observation")
    for name in extra:
        key = ("deep", "down", "told") if name == "deep" else (name,)
        told = extra_of(numbers, name).numpy()
        if key in mine.columns:
            verdict.rows(equal(mine[key], told), mine, f"the policy did not write this {key}")


def _network(config: Configuration, run: Run, mine: Rows, verdict: Verdict) -> None:
    """Check that the network chose the actions, by its current state except for carried rows."""
    space, keys, policy = config.env.lane.action_space(), config.policy_keys, config.policy
    assert policy is not None
    action = mine["action",]
    old = equal(action, wanted_after(policy.change, space, keys, mine.columns, changed=False))
    if not run.changed:
        verdict.rows(old, mine, "the network does not act so on this observation")
        return
    new = equal(action, wanted_after(policy.change, space, keys, mine.columns, changed=True))
    verdict.rows(old | new, mine, "neither the network as it was nor as it is acts so")
    late = mine.batch >= config.phase_after
    verdict.rows(old | late, mine, "acted so before the change")
    over = int((late & ~new).sum())
    verdict(over < config.env.lanes, f"{over} rows are chosen by what the policy was before")


def _versions(config: Configuration, run: Run, rows: Rows, verdict: Verdict) -> None:
    """Check that versions are 0, and 1 after an update except for rows carried over it."""
    version = rows["collector", "policy_version"]
    if run.updated_at is None:
        right = (version == run.first_version) | (version == -1)
        verdict.rows(right, rows, f"policy_version is not {run.first_version}")
        return
    late = np.arange(len(rows)) >= run.updated_at
    verdict.rows((version == 1) <= late, rows, "a version that was not there yet")
    for lane in range(config.env.lanes):
        own = version[rows["collector", "lane"] == lane]
        verdict(bool((np.diff(own) >= 0).all()), f"lane {lane}: versions go back")
    old = late & (version == 0)
    carried = 0 if config.surplus == "never_step" else config.env.lanes - 1
    verdict(old.sum() <= carried, f"{old.sum()} rows chosen by old weights")


def _random_frames(
    config: Configuration, outcome: Outcome, whole: list[Rows], verdict: Verdict
) -> None:
    if config.policy is None or outcome.error is not None:
        return
    alone = config.phase in ("append", "in turn")
    groups = [[each] for each in whole] if alone else [whole]
    for group in groups:
        if config.several is not None and config.several.draws:
            check_several(config.several, group, verdict)
            continue
        count = sum(map(len, group))
        random = sum(
            int((each["collector", "policy_version"] == -1).sum()) for each in group if len(each)
        )
        wanted = min(config.init_random_frames, count)
        verdict(random == wanted, f"{random} random frames, {wanted} were asked for")


def _flags(config: Configuration, outcome: Outcome, rows: Rows, verdict: Verdict) -> None:
    """Check that self-resets are reported in time. Check agents' flags and transforms' columns."""
    env = config.env
    # In episodes of one step, first and final observations cannot be distinguished.
    steps = [length for lane in env.lane.lengths for length in lane]
    told = sum(steps) - len(steps) > len(steps) / 4
    if env.lane.self_reset == "once" and not env.auto_reset and not config.loses_finals and told:
        last = rows.batch == rows.batch.max()
        done = rows["next", "done"].reshape(-1)
        late = int(done[~last].sum())
        verdict(late < SELF_RESETS_SEEN + env.lanes, f"{late} lost finals before the last batch")
    apart = env.lane.agents and not env.lane.joins
    for name in ("done", "terminated", "truncated") if apart else ():
        same = rows["next", "agents", name].reshape(len(rows), -1) == rows["next", name]
        verdict.rows(same.all(-1), rows, f"{name} of the agents")
    if "norm" in env.transforms and not config.uses_files:
        for lead in ((), ("next",)):
            right = was_told(outcome.told, rows[*lead, "observation"], rows[*lead, "relative"])
            verdict.rows(right, rows, f"{lead} relative is not what the transform made of it")
        said = config.workers < 2 or "StatisticsWarning" in outcome.warned
        verdict(said, "workers have statistics apart, and nothing said so")
    passes = config.validate == "warn" and "OutOfRangeWarning" in outcome.warned
    if env.lane.spoil == "nothing legal" and config.validate != "off" and not passes:
        chosen = rows["collector", "policy_version"] != -1  # a policy may ignore the mask
        legal = rows["action_mask",].any(-1) | chosen
        verdict.rows(legal, rows, "a random action where nothing is legal")
    if may_skip(config):
        return
    step = rows["collector", "step"]
    if "steps" in env.transforms:
        verdict.rows(rows["step_count",][:, 0] == step, rows, "step_count")
        verdict.rows(rows["next", "step_count"][:, 0] == step + 1, rows, "next step_count")
    if "init" in env.transforms:
        verdict.rows(rows["is_init",].reshape(-1) == (step == 0), rows, "is_init")
    if "sum" in env.transforms:
        ids, total = rows["collector", "traj_ids"], rows["next", "episode_reward"].reshape(-1)
        reward = rows["next", "reward"].reshape(-1)
        for id in np.unique(ids):
            own = ids == id
            sums = np.cumsum(reward[own].astype(np.float64))
            verdict(np.allclose(sums, total[own]), f"episode_reward of trajectory {id}")


def _ledger(
    config: Configuration,
    outcome: Outcome,
    run: Run,
    rows: Rows,
    executed: int | None,
    verdict: Verdict,
) -> None:
    counts = run.counts
    if not counts:
        return
    c = counts.get
    balanced = c("slots") == c("executed", 0) + c("reset_slots", 0) and c("executed") == sum(
        counts[name] for name in ("stored", "discarded", "carried", "lost")
    )
    verdict(balanced, f"the ledger does not balance: {counts}")
    verdict(counts["carried"] == 0, f"{counts['carried']} are carried at the end")
    if run.error is not None or run.number or config.env.lane.spoil:
        return
    verdict(counts["stored"] == len(rows), f"stored {counts['stored']}, there are {len(rows)}")
    if run.ended_by_interrupt:  # the current step may be incomplete
        return
    right = executed is None or counts["executed"] == executed
    verdict(right, f"executed {counts['executed']}, not {executed}")
    complete = int(rows["next", "done"].sum()) if len(rows) else 0
    if config.env.lane.joins:
        living = int(rows["agents", "mask"].sum()) if len(rows) else 0
        got = counts["agent_transitions"]
        verdict(got == living, f"{got} agent transitions, there are {living}")
    got = counts["episodes_complete"]
    verdict(got == complete, f"{got} complete episodes, there are {complete}")
    if config.total_episodes is not None and config.phase in ("", "interrupt", "change"):
        verdict(complete == config.total_episodes, f"{complete} episodes")


def _spends_slots(config: Configuration) -> bool:
    env = config.env
    recurrent = config.policy is not None and config.policy.recurrent
    changed = env.transforms or config.max_frames_per_traj or recurrent
    avoided = not env.adapter and config.reset_slots == "avoid" and env.system == "sync"
    return env.has_reset_slots and not changed and not avoided


def _order(
    config: Configuration,
    outcome: Outcome,
    run: Run,
    placed: list[tuple[list[int], list[Made]]],
    verdict: Verdict,
) -> None:
    """Check that the rows are the first ones, ordered by slot and then by lane."""
    plain = config.surplus == "carry" and config.mode == "sync" and config.phase == ""
    if not plain or config.reset_at_each_iter or config.env.lane.self_reset:
        return
    spends = _spends_slots(config)
    slots = [
        (each.event - 1 if spends else number, lane, number)
        for lane, (_, made) in enumerate(placed)
        for number, each in enumerate(made)
    ]
    taken = {(lane, number) for lane, (where, _) in enumerate(placed) for number in where}
    if config.total_episodes is not None:
        _first_episodes(config, slots, placed, verdict)
        return
    first = {(lane, number) for _, lane, number in sorted(slots)[: len(taken)]}
    verdict(taken == first, "the rows are not the first ones in slot order")


def _first_episodes(
    config: Configuration,
    slots: list[tuple[int, int, int]],
    placed: list[tuple[list[int], list[Made]]],
    verdict: Verdict,
) -> None:
    """Check that the rows are the whole episodes that started first."""
    wanted: set[tuple[int, int]] = set()
    starts = 0
    for _, lane, number in sorted(slots):
        made = placed[lane][1]
        if made[number].step or starts == config.total_episodes:
            continue
        starts += 1
        stop = number + 1
        while stop < len(made) and made[stop].step:
            stop += 1
        wanted |= {(lane, each) for each in range(number, stop)}
    taken = {(lane, number) for lane, (where, _) in enumerate(placed) for number in where}
    verdict(taken == wanted, "the rows are not the episodes that started first")
