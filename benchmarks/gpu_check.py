"""Check that Tallyroll works on a GPU, and measure it, in at most eight minutes.

    python benchmarks/gpu_check.py --device cuda --json gpu.json
    python benchmarks/gpu_check.py --device cpu --seconds 1

Each section runs in its own process. If a case fails, the others still run. If a case crashes the
process, makes the device unusable or does not end, the next case runs in a new process. The file of
``--json`` is written after every section. The exit status is 1 if a case failed or was left out for
lack of time, and 2 if the device is not available. ``--device fakegpu`` is the simulated GPU of the
tests, which needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve()
DEVICES = ("cuda", "xpu", "mps", "cpu", "fakegpu")
SECTIONS = {
    "correctness": "gpu_rows",
    "waits": "gpu_times",
    "bandwidth": "gpu_times",
    "rings": "gpu_times",
    "collectors": "gpu_times",
    "workers": "gpu_rows",
}
"""The module of each section. Its function with the name of the section returns the cases."""
START_SECONDS = 150.0
"""Time limit until the first case starts. With a cold disk, the imports take a minute."""
CASE_SHARE = 0.25
"""Time limit of a case, as a share of ``--minutes``."""
LEAST_SECONDS = 15.0
"""Sections do not start if less time is left."""
RESTARTS = 3
"""Maximum number of new processes for a section."""
UNAVAILABLE = 2


# --- the process of a section ---------------------------------------------------------------------


def run_cases(args: argparse.Namespace) -> int:
    """Run the cases of one section, and append a line of JSON to ``args.results`` for each."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    write = Lines(args.results).write
    try:
        found = describe(args.device)
        if found is None:
            return UNAVAILABLE
        write({"setting": found})
        cases = getattr(import_module(SECTIONS[args.only]), args.only)(args.device, args.seconds)
    except Exception as error:  # noqa: BLE001  the parent process reports it
        write({"case": "start", **failure(error)})
        return 1
    for number, (name, call) in enumerate(cases.items()):
        if number < args.first:
            continue
        write({"began": name, "number": number})
        began = time.monotonic()
        try:
            result = call()
            record: dict[str, Any] = {"found": result}
            if isinstance(result, dict) and result.get("errors"):
                record["error"] = "; ".join(f"{k}: {v}" for k, v in result["errors"].items())
        except Exception as error:  # noqa: BLE001  the next case may pass
            record = failure(error)
        write({"case": name, "seconds": round(time.monotonic() - began, 2), **record})
        if "error" in record and not is_healthy(args.device):
            write({"note": "the device no longer works in this process"})
            sys.stdout.flush()
            os._exit(3)
    write({"complete": len(cases)})
    return 0


class Lines:
    """File of JSON lines, each of which other processes can read once it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record: dict[str, Any]) -> None:
        """Append a record."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, default=str) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Return the records, without an incomplete last line."""
        if not self.path.exists():
            return []
        *lines, _ = self.path.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines]


def failure(error: Exception) -> dict[str, str]:
    """Return the record of an exception."""
    text = " ".join(str(error).split())
    last = traceback.extract_tb(error.__traceback__)[-1]
    return {
        "error": f"{type(error).__name__}: {text}"[:600],
        "where": f"{'/'.join(Path(last.filename).parts[-2:])}:{last.lineno}",
        "traceback": "".join(traceback.format_exception(error))[-6000:],
    }


def describe(device: str) -> dict[str, Any] | None:
    """Prepare torch. Return machine, versions and device; None if the device is unavailable."""
    import torch
    from common import machine, prepare, versions

    prepare()
    found = {"machine": machine(), "versions": versions(), "device": device}
    if device == "cpu":
        return found
    there = torch.accelerator.current_accelerator(check_available=True)
    if there is None or there.type != device:
        other = "cpu" if there is None else f"{there.type} or cpu"
        print(f"--device: expected {other} on this machine, got {device}.", flush=True)
        return None
    torch.ones(1, device=device).add_(1).cpu()  # an unusable driver raises here
    module = torch.get_device_module(device)
    if hasattr(module, "get_device_name"):
        found["device"] = module.get_device_name()
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"memory": properties.total_memory, "cuda": torch.version.cuda}
    return found


def is_healthy(device: str) -> bool:
    """Return False if the device no longer computes, as after an illegal access on CUDA."""
    import torch

    try:
        return bool(torch.ones(1, device=device).add_(1).item() == 2)
    except Exception:  # noqa: BLE001
        return False


# --- the main process -----------------------------------------------------------------------------


class SectionProcess:
    """Process of a section, with time limits.

    Args:
        args: the arguments.
        section: the section.
        first: the number of the first case to run.
        results: the file of its results.
        environment: environment variables.
    """

    def __init__(
        self, args: argparse.Namespace, section: str, first: int, results: Path,
        environment: dict[str, str],
    ) -> None:  # fmt: skip
        self.lines, self.case_limit = Lines(results), CASE_SHARE * 60 * args.minutes
        command = [
            *(sys.executable, str(SCRIPT), "--device", args.device, "--only", section),
            *("--seconds", str(args.seconds), "--results", str(results), "--first", str(first)),
        ]
        # In a session of its own, so that a kill also reaches the workers that it starts.
        self.process = subprocess.Popen(command, env=environment, start_new_session=True)

    def wait(self, deadline: float) -> str:
        """Wait for the end of the process, or kill it at a time limit. Return the reason."""
        length, since, limit = 0, time.monotonic(), START_SECONDS
        try:
            while self.process.poll() is None:
                time.sleep(0.05)
                now, records = time.monotonic(), self.lines.read()
                if len(records) > length:
                    length, since = len(records), now
                    if any("began" in each for each in records):
                        limit = self.case_limit
                    if "complete" in records[-1]:
                        limit = 20.0  # to exit
                if now > deadline:
                    return "the time limit of --minutes"
                if now - since > limit:
                    return f"no result for {limit:g} s"
        finally:
            self.kill()
        return f"the process ended with status {self.process.returncode}"

    def kill(self) -> None:
        """Kill the process and its children. If it is running, it first prints its stacks."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run_section(
    args: argparse.Namespace, section: str, environment: dict[str, str], deadline: float
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Run a section. Return the records of its cases, and the setting if there is a device."""
    cases: list[dict[str, Any]] = []
    first, setting = 0, None
    for attempt in range(1 + RESTARTS):
        results = Path(environment["TMPDIR"]) / f"{section}-{attempt}.jsonl"
        process = SectionProcess(args, section, first, results, environment)
        reason = process.wait(deadline)
        records = process.lines.read()
        setting = next((each["setting"] for each in records if "setting" in each), setting)
        if process.process.returncode == UNAVAILABLE and setting is None:
            return [], None
        cases += [each for each in records if "case" in each]
        if any("complete" in each for each in records):
            return cases, setting
        begun = [each for each in records if "began" in each]
        if not begun:
            if not any(each["case"] == "start" for each in cases):
                cases.append({"case": "start", "error": reason})
            return cases, setting or {}
        if not cases or cases[-1]["case"] != begun[-1]["began"]:
            cases.append({"case": begun[-1]["began"], "error": reason})
        first = begun[-1]["number"] + 1
        if deadline - time.monotonic() < LEAST_SECONDS:
            reason = "no time is left"
            break
    cases.append({"case": "further cases", "error": f"left out: {reason}"})
    return cases, setting


def environment_of(device: str, scratch: Path) -> dict[str, str]:
    """Return the environment variables of the processes."""
    found = {**os.environ, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
    if device == "fakegpu":
        sys.path.insert(0, str(SCRIPT.parents[1] / "tests" / "support"))
        kit = import_module("fake_gpu_kit")
        found |= {key: kit.environment()[key] for key in ("PYTHONPATH", "TALLYROLL_FAKE_GPU")}
    return found


def print_section(section: str, cases: list[dict[str, Any]], seconds: float) -> list[str]:
    """Print the summary of a section. Return the names of failed cases."""
    failed = [each for each in cases if "error" in each]
    print(f"{section}: {len(cases)} cases, {len(failed)} failed, {seconds:.0f} s", flush=True)
    for each in failed:
        place = f" ({each['where']})" if "where" in each else ""
        print(f"  FAILED {each['case']}: {each['error']}{place}", flush=True)
    return [f"{section}: {each['case']}" for each in failed]


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make SIGTERM raise `SystemExit`, so that processes and files are removed."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def check(args: argparse.Namespace) -> int:
    """Run the sections and return the exit status."""
    start = time.monotonic()
    deadline = start + 60 * args.minutes
    report: dict[str, Any] = {"device": args.device, "sections": {}, "failed": []}
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="tallyroll-gpu-") as scratch:
        environment = environment_of(args.device, Path(scratch))
        for section in args.only:
            began = time.monotonic()
            print(f"== {section}", flush=True)
            if deadline - began < LEAST_SECONDS:
                cases, setting = [{"case": "all", "error": "left out: no time is left"}], {}
            else:
                cases, setting = run_section(args, section, environment, deadline)
            if setting is None:
                return UNAVAILABLE
            if setting and "setting" not in report:
                report["setting"] = setting
                print(f"  {setting['device']}, {setting['versions']}", flush=True)
            seconds = round(time.monotonic() - began, 1)
            report["failed"] += print_section(section, cases, seconds)
            report["sections"][section] = {"seconds": seconds, "cases": cases}
            report["seconds"] = round(time.monotonic() - start, 1)
            if args.json is not None:
                args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{len(report['failed'])} failed in {report['seconds']:.0f} s", flush=True)
    return 1 if report["failed"] else 0


def sections_of(text: str) -> list[str]:
    """Return the sections of a comma-separated list, in their own order."""
    names = text.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(
            f"expected some of {', '.join(SECTIONS)}, got {', '.join(unknown)}"
        )
    return [name for name in SECTIONS if name in names]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument(
        "--seconds",
        type=float,
        default=25.0,
        help="duration of each of bandwidth, rings and collectors",
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of all sections")
    parser.add_argument("--json", type=Path, help="write results to this file")
    parser.add_argument(
        "--only", type=sections_of, default=[*SECTIONS], metavar="SECTION,…",
        help=f"sections to run: {', '.join(SECTIONS)}",
    )  # fmt: skip
    # Options of the processes of sections.
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Check the device, or run the cases of one section."""
    args = parse_args(argv)
    if args.results is None:
        return check(args)
    (args.only,) = args.only
    return run_cases(args)


if __name__ == "__main__":
    sys.exit(main())
