"""Errors for failed workers, with the cause, the lanes and the remedy."""

import pickle
from typing import Any

from gymnasium.error import UnregisteredEnv

from tallyroll.collector.envs.gymnasium.make import NOT_REGISTERED
from tallyroll.collector.errors import (
    CollectorError,
    WorkerDied,
    WorkerError,
    WorkerHung,
    WorkerRaised,
)
from tallyroll.collector.rollout.actor import WHILE_ACTING
from tallyroll.collector.workers.member import Member
from tallyroll.collector.workers.messages import ExceptionReport
from tallyroll.collector.workers.transport import Gone

_PROCESS = 'transport="process", whose workers can be ended and replaced'
_SHOWN = 16
"""Maximum number of lanes whose seeds a message shows."""


def worker_error(member: Member, report: ExceptionReport) -> Exception:
    """Return the error for an exception in a worker."""
    original = _unpickled(report.error)
    if isinstance(original, CollectorError):
        setattr(original, WHILE_ACTING, report.acting)
        original.add_note(f"raised in {member.who}:\n{report.traceback}")
        return original
    lane = None if report.lane is None else member.lanes[report.lane]
    details = _details(member, lane)
    hint = f"\n{NOT_REGISTERED}" if isinstance(original, UnregisteredEnv) else ""
    error = WorkerRaised(
        f"{member.who} raised {report.kind} while {report.doing or 'getting ready'}: "
        f"{report.message}{details}{hint}\nIts traceback:\n{report.traceback}",
        **_facts(member, lane),
        worker_traceback=report.traceback,
    )
    error.__cause__ = original
    setattr(error, WHILE_ACTING, report.acting)
    return error


def died(member: Member, gone: Gone) -> WorkerError:
    """Return the error for a worker that ended."""
    if gone.mistake:
        text = gone.mistake.format(who=member.who)
    elif not member.ready:
        text = f"{member.who} {gone.how} before it was ready. Its output on stderr may explain this"
    else:
        text = (
            f"{member.who} {gone.how}{_details(member, None)}\nCommitted rows are safe. Pass "
            f'on_worker_death="respawn" to continue with a new worker{gone.hint}'
        )
    return WorkerDied(text, **_facts(member, None), exitcode=gone.exitcode)


def hung(member: Member, seconds: float, ended: bool) -> WorkerError:
    """Return the error for a worker that made no progress for ``seconds`` seconds.

    ``ended`` is True if the worker was ended, which is impossible for a thread.
    """
    end = (
        "and was ended"
        if ended
        else "and a thread cannot be ended: it continues in its environment"
    )
    if not member.ready:
        text = f"{member.who} was not ready after start_timeout={seconds:g} seconds, {end}"
    else:
        way = 'on_worker_death="respawn" to continue with a new worker'
        text = (
            f"{member.who} completed no step within step_timeout={seconds:g} seconds, "
            f"{end}{_details(member, None)}\nCommitted rows are safe. Make step_timeout larger, or "
            f"pass {way if ended else _PROCESS}"
        )
    return WorkerHung(text, **_facts(member, None))


def _details(member: Member, lane: int | None) -> str:
    """Return the lane, seed and last action as text, as far as they are known."""
    facts = _facts(member, lane)
    seeds, last = facts["seeds"], facts["action"]
    if lane is not None:
        of = f"; lane {lane}"
        of += f" (seed {seeds[0]})" if seeds else ""
        return of + ("" if last is None else f", last action {last!r:.400}")
    text = ""
    if seeds:
        more = ", …" if len(seeds) > _SHOWN else ""
        text += f"; seeds {str(list(seeds[:_SHOWN]))[1:-1]}{more}"
    return text + ("" if last is None else f"; last actions {last!r:.400}")


def _facts(member: Member, lane: int | None) -> dict[str, Any]:
    seeds, action = list(member.seeds), member.last_action
    if lane is not None:
        at = member.lanes.index(lane)
        seeds = seeds[at : at + 1]
        action = None if action is None else action[at]
    last = None if action is None else action.tolist()
    return {
        "worker": member.index,
        "lanes": member.lanes,
        "lane": lane,
        "seeds": seeds,
        "action": last,
    }


def _unpickled(error: bytes | None) -> BaseException | None:
    """Return the original exception, or None if it cannot be unpickled."""
    if error is None:
        return None
    try:
        found = pickle.loads(error)
    except Exception:  # noqa: BLE001  fall back to the text of the report
        return None
    return found if isinstance(found, BaseException) else None
