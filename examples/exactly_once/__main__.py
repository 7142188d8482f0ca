# SPDX-License-Identifier: Apache-2.0

"""Numbered events in both directions and a file sink on real Spark, exactly once, whatever dies on the way.

A streaming job: a coordinator sends 1, 2, 3 and so on to each of ``--parallelism`` long-running tasks, and each task
does the same to the coordinator, a hundred a second; ten times a second there is a checkpoint. The tasks write every
number that they send or receive into a two-phase sink. Meanwhile, at moments drawn from ``--seed``,

  - a task is killed with SIGKILL,
  - an attempt is stopped with SIGSTOP: it confirms nothing, and is failed for that,
  - the coordinator fails the whole job, by an exception or by fail_job,
  - the driver is killed with SIGKILL, and a new one continues from the last checkpoint,
  - if ``storage`` is among ``--faults``: a checkpoint gets its name, but the storage reports a failure or hangs, and is
    out of reach or refuses deletions for a while; the job fails meanwhile, and in half of the runs the driver dies.

In every other run, counted by the seed, checkpoints hold no events (``--events``).

Then comes the proof from the files on disk: in the last checkpoint both sides know every number exactly once and in
order, and a reader of the sink sees the same. ``pipeline.py`` is the pipeline itself.

Exit status: 0 if everything was exactly once, in every run; 1 if not (the seed is shown, the files are kept); 2 for
wrong arguments or an unusable environment; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import fsspec

from examples.exactly_once.faults import ALL_KINDS, KINDS, STORAGE, WHAT
from examples.exactly_once.proof import table
from examples.exactly_once.trial import Outcome, SparkDidNotStart, Trial, TrialOptions

SEED_MAX = 10**6
TASK_FAILURES_MAX = 8


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="exactly_once", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--parallelism", type=int, default=4, metavar="N", help="subtasks (default: %(default)s)")
    text = "how many numbers go each way, for each subtask (default: %(default)s)"
    option("--numbers", type=int, default=400, metavar="N", help=text)
    option("--seed", type=int, metavar="N", help="repeat a run's moments of failure (default: a new one)")
    option("--runs", type=int, default=1, metavar="N", help="so many, each with the next seed, up to the first failure")
    text = f"comma-separated: {', '.join(ALL_KINDS)}; or none (default: all but {STORAGE})"
    option("--faults", default=",".join(KINDS), help=text)
    option("--master", metavar="URL", help=f"Spark master (default: local[N,{TASK_FAILURES_MAX}], N the parallelism)")
    text = "where checkpoints and the sink lie, in a folder for each seed (default: a temporary folder)"
    option("--storage", metavar="URL", help=text)
    option("--keep", action="store_true", help="keep the temporary folder, with the drivers' logs, of right runs too")
    text = (
        "what checkpoints do with events: hold them, record them, or each in turn, by the seed (default: %(default)s)"
    )
    option("--events", choices=("hold", "record", "both"), default="both", help=text)
    text = "seconds that a driver may live before it is taken for hanging (default: %(default)s)"
    option("--timeout", type=float, default=90.0, metavar="S", help=text)
    options = parser.parse_args(arguments)
    for name in ("parallelism", "numbers", "runs", "timeout"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} must be more than 0, not {getattr(options, name)}")
    options.faults = tuple(fault for fault in options.faults.split(",") if fault not in ("", "none"))
    for fault in options.faults:
        if fault not in ALL_KINDS:
            parser.error(f"--faults: {fault!r} is none of {', '.join(ALL_KINDS)} and none")
    options.master = options.master or f"local[{options.parallelism},{TASK_FAILURES_MAX}]"
    if options.faults and re.fullmatch(r"local(\[[^,]*\])?", options.master):
        parser.error(f"--master: {options.master} retries no task: write local[N,{TASK_FAILURES_MAX}]")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(SEED_MAX)
    if options.storage:
        options.storage = options.storage.rstrip("/")
        if "://" not in options.storage:
            options.storage = str(Path(options.storage).absolute())
        elif STORAGE in options.faults:
            parser.error(f"--faults: {STORAGE} needs a local folder as --storage, not {options.storage}")
        for seed in range(options.seed, options.seed + options.runs):
            if has_content(url := f"{options.storage}/seed-{seed}"):
                parser.error(f"--storage: {url} has been used: remove it, or choose another --seed")
    return options


def has_content(url: str) -> bool:
    filesystem, path = fsspec.core.url_to_fs(url)
    return bool(filesystem.exists(path) and filesystem.ls(path))


def holds_events(options: argparse.Namespace, seed: int) -> bool:
    return bool(options.events == "hold" or (options.events == "both" and seed % 2 == 0))


def try_once(options: argparse.Namespace, seed: int, *, alone: bool) -> Outcome:
    """Run once. ``alone``: report what happens while it happens."""
    folder = Path(tempfile.mkdtemp(prefix=f"exactly-once-{seed}-"))
    url = f"{options.storage}/seed-{seed}" if options.storage else str(folder)
    trial = Trial(
        TrialOptions(
            seed,
            options.master,
            options.parallelism,
            options.numbers,
            options.faults,
            options.timeout,
            folder,
            url,
            holds_events(options, seed),
        ),
        say=lambda text: print(f"  {text}", file=sys.stderr) if alone else None,
    )
    keep = options.keep
    try:
        outcome = trial.run()
        keep = keep or bool(outcome.wrong)
        return outcome
    finally:
        if keep:
            print(f"what seed {seed} has left is kept in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def report(outcome: Outcome, seed: int) -> None:
    """Print the results of a run that is shown in full: the only one, or the one that went wrong."""
    if outcome.proof is not None:
        print(table(outcome.proof))
        print(
            f"{outcome.proof.files} visible files, {outcome.checkpoints} checkpoints by the last of "
            f"{outcome.drivers} drivers, {outcome.seconds:.1f} s"
        )
    for kind in outcome.missed:
        print(f"it never came to it that {WHAT[kind]}")
    for text in outcome.wrong:
        print(f"  {text}")
    if outcome.wrong:
        print(f"again: --seed {seed}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    alone = options.runs == 1
    struck: Counter[str] = Counter()
    if alone:
        print(
            f"seed {options.seed}: {options.parallelism} subtasks, {options.numbers} numbers each way, checkpoints "
            f"{'hold' if holds_events(options, options.seed) else 'record'} events",
            file=sys.stderr,
        )
    try:
        for number in range(options.runs):
            seed = options.seed + number
            outcome = try_once(options, seed, alone=alone)
            struck.update(outcome.struck)
            if not alone:
                verdict = "WRONG" if outcome.wrong else "right"
                faults = ", ".join(outcome.struck) or "no faults"
                print(
                    f"{number + 1}/{options.runs}  seed {seed}  {verdict}  {outcome.seconds:5.1f} s  {faults}",
                    flush=True,
                )
            if alone or outcome.wrong:
                report(outcome, seed)
            if outcome.wrong:
                print("exactly once: no")
                return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except SparkDidNotStart as error:
        print(f"Spark did not start: {error}", file=sys.stderr)
        return 2
    if not alone:
        print(f"{options.runs} runs; " + ", ".join(f"{times} times {WHAT[kind]}" for kind, times in struck.items()))
    print("exactly once: yes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
