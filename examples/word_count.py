# SPDX-License-Identifier: Apache-2.0

"""Count the words of a source tree on Spark, with a coordinator that hands out the files.

The files of ``--input`` are splits; ``--parallelism`` long-running Spark tasks ask for them, a few at a time. On the
way (``--faults``) one task's process is killed with SIGKILL while it holds unfinished splits, and one attempt stops
responding: its process is stopped with SIGSTOP, so it confirms nothing, its confirmation times out, and exactly that
attempt is killed through Spark. Their splits go to others. The counts are then compared, word by word, with those of
a plain Spark job over the same files.

It needs ``headgate[pyspark]``, and nothing else; ``--help`` lists its options.

Exit status: 0 if every word agrees; 1 if not, or if the job failed; 2 for wrong arguments or an unusable environment;
130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

from headgate import (
    NO_RESTART,
    FailureReason,
    GatewayLimits,
    HeadgateError,
    OperatorHandle,
    Sidecar,
    SidecarConfig,
    SourceCoordinator,
    SplitReader,
    StaticSplitEnumerator,
    interrupts_held_back,
)
from headgate.errors import RestartsExhausted
from headgate.types import LatencyRecorder

WORD = re.compile(r"\w+")
KILL, UNRESPONSIVE = "kill", "unresponsive"
FAULTS = (KILL, UNRESPONSIVE)
BATCH_MAX = 8  # splits handed out together: a small file costs less than asking for it
CONFIRM_TIMEOUT_S = 2.0
POKE_EVERY_S = 0.2
SNIFFED_BYTES = 8192
FOLDERS_LEFT_OUT = ("__pycache__", "site-packages", "dist-packages", ".git")
SPARK_ERRORS = (PySparkException, Py4JError)
SPARK_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
}


# --- in the tasks -------------------------------------------------------------------------------------------------


def words_of(path: str) -> list[str]:
    """The words of one file; bytes that are not UTF-8 become replacement characters, which count as no word."""
    return WORD.findall(Path(path).read_text(encoding="utf-8", errors="replace"))


class CountWords(SplitReader):
    """Counts the words of the files that it gets, and yields the sums when there are no more."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self._root = Path(root)
        self._counts: Counter[str] = Counter()

    def read_split(self, split: str) -> None:
        self._counts.update(words_of(str(self._root / split)))
        self.context.send_event(["done", split])

    def finish(self) -> Iterable[tuple[str, int]]:
        return self._counts.items()

    def handle_source_event(self, event: Any) -> None:
        match event:
            case ["ping", sent_at]:
                self.context.send_event(["pong", sent_at])
            case ["fault", "kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["fault", "unresponsive"]:
                os.kill(os.getpid(), signal.SIGSTOP)


# --- in the driver ------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """The messages that the coordinator shows to the user: a line for each tenth. Written on the sidecar's loop."""

    total: int
    done: dict[int, int] = field(default_factory=dict)  # subtask -> splits read by its current attempt
    shown: int = 0
    echo_us: LatencyRecorder = field(default_factory=LatencyRecorder)
    happened: list[str] = field(default_factory=list)

    def split_done(self, subtask: int) -> None:
        self.done[subtask] = self.done.get(subtask, 0) + 1
        done = sum(self.done.values())
        if 10 * done // self.total > 10 * self.shown // self.total:
            self.shown = done
            print(f"{done}/{self.total} splits", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        self.happened.append(text)
        print(f"  {text}", file=sys.stderr, flush=True)


class WordSplits(StaticSplitEnumerator):
    """Hands out files, measures echoes, and tells two of the readers to fail."""

    def __init__(self, files: Sequence[str], faults: list[str], batch_size: int, progress: Progress) -> None:
        super().__init__(files, batch_size=batch_size)
        self._faults = faults
        self._ripe_after = 2 * batch_size  # a victim has read this many, and so has something to lose
        self._victims: set[int] = set()
        self._progress = progress

    async def handle_split_request(self, subtask: int) -> None:
        had_splits = self.pending_count > 0
        await super().handle_split_request(subtask)
        if not had_splits:
            return
        await self._context.send_event(subtask, ["ping", time.perf_counter_ns()])
        if self._faults and self._is_ripe(subtask):
            fault = self._faults.pop(0)
            self._victims.add(subtask)
            self._progress.note(f"subtask {subtask} is told to {'die' if fault == KILL else 'stop responding'}")
            await self._context.send_event(subtask, ["fault", fault])
            if fault == UNRESPONSIVE:
                self._poke(subtask, self._context.attempts(subtask))

    async def handle_source_event(self, subtask: int, attempt: int, event: Any) -> None:
        match event:
            case ["done", _]:
                self._progress.split_done(subtask)
            case ["pong", sent_at]:
                self._progress.echo_us.record((time.perf_counter_ns() - sent_at) / 1000)

    async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
        await super().add_splits_back(splits, subtask)
        self._progress.done.pop(subtask, None)
        self._progress.note(f"subtask {subtask} is reset: {len(splits)} splits given back")

    def _is_ripe(self, subtask: int) -> bool:
        """Whether it has something to lose and was spared so far, or these are the last splits, so it must be it."""
        if not self.pending_count:
            return True
        spared = subtask not in self._victims or self._context.parallelism == 1
        return spared and self._progress.done.get(subtask, 0) >= self._ripe_after

    def _poke(self, subtask: int, attempts: list[int]) -> None:
        """Keep sending the stopped attempt events to confirm, for as long as it counts as alive."""

        async def poke() -> None:
            if self._context.attempts(subtask) == attempts:
                await self._context.send_event(subtask, ["are you there"])
                self._poke(subtask, attempts)

        self._context.coordinator.call_later(POKE_EVERY_S, poke)


class WordCoordinator(SourceCoordinator):
    """A source coordinator that reports which attempts were lost."""

    def __init__(self, files: Sequence[str], faults: Iterable[str], batch_size: int, progress: Progress) -> None:
        self.faults_left = list(faults)
        super().__init__(lambda state: WordSplits(files, self.faults_left, batch_size, progress))
        self.progress = progress

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self.progress.note(f"subtask {subtask} lost attempt {attempt}: {reason.kind.name.lower()}")
        await super().subtask_failed(subtask, attempt, reason)


def find_files(root: Path) -> tuple[dict[str, int], int]:
    """The text files under ``root``, relative to it, with modification times, and the number of others left out."""
    files: dict[str, int] = {}
    left_out = 0
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in FOLDERS_LEFT_OUT)
        for name in sorted(names):
            path = Path(folder, name)
            try:
                if is_text(path):
                    files[str(path.relative_to(root))] = path.stat().st_mtime_ns
                else:
                    left_out += 1
            except OSError:
                left_out += 1
    return files, left_out


def is_text(path: Path) -> bool:
    if not path.is_file():  # reading a pipe would wait forever
        return False
    try:
        str(path).encode()
    except UnicodeEncodeError:  # such a name cannot be sent as a split
        return False
    with path.open("rb") as file:
        return b"\0" not in file.read(SNIFFED_BYTES)


def changed_since(root: Path, files: dict[str, int]) -> list[str]:
    """Those of ``files`` that were deleted or written meanwhile: their words cannot be compared."""

    def changed(name: str) -> bool:
        try:
            return (root / name).stat().st_mtime_ns != files[name]
        except OSError:
            return True

    return [name for name in files if changed(name)]


def count_coordinated(
    sidecar: Sidecar, coordinator: WordCoordinator, root: Path, parallelism: int
) -> tuple[dict[str, int], OperatorHandle]:
    """The sums of one coordinated Spark job."""
    words = sidecar.coordinate("words", coordinator, parallelism=parallelism)
    counts: Counter[str] = Counter()
    try:
        for word, count in words.run(words.subtask(CountWords, str(root)), restart=NO_RESTART):
            counts[word] += count
    except (*SPARK_ERRORS, RestartsExhausted) as error:
        raise JobFailed(words.failure or error.__cause__ or error) from error
    return counts, words


def count_plainly(spark: SparkSession, root: Path, files: Sequence[str], parallelism: int) -> dict[str, int]:
    """The same sums by Spark alone."""
    tasks = min(4 * parallelism, len(files))
    paths = [([str(root / name) for name in files[task::tasks]],) for task in range(tasks)]

    def words_of_all(paths: Sequence[str]) -> list[tuple[str, int]]:
        return list(Counter(word for path in paths for word in words_of(path)).items())

    count = udf(words_of_all, "array<struct<word: string, number: long>>", useArrow=False)
    try:
        counted = (
            spark.createDataFrame(paths, "paths array<string>").repartition(tasks).select(count("paths").alias("n"))
        )
        return {row[0]: row[1] for row in counted.selectExpr("inline(n)").groupBy("word").sum("number").collect()}
    except SPARK_ERRORS as error:
        raise JobFailed(error) from error


def report(summary: dict[str, Any], out: TextIO) -> None:
    def latency(figures: dict[str, float | None]) -> str:
        if figures["p50"] is None:
            return "none measured"
        return f"p50 {figures['p50']:.0f} µs, p99 {figures['p99']:.0f} µs"

    kinds = ", ".join(f"{count} {kind}" for kind, count in summary["failures_by_kind"].items())
    rows = [
        ("subtasks", summary["subtasks"]),
        ("splits", summary["splits"]),
        ("words", f"{summary['words']} ({summary['distinct_words']} different ones)"),
        ("execution attempts", summary["attempts"]),
        ("failures", f"{summary['failures']} ({kinds})" if kinds else summary["failures"]),
        ("resets", summary["resets"]),
        ("splits given back", summary["splits_given_back"]),
        ("events, both ways", summary["events"]),
        ("send to confirmation", latency(summary["confirm_us"])),
        ("send to echo", latency(summary["echo_us"])),
        ("Spark's callback to coordinator", latency(summary["fact_us"])),
        ("seconds", f"{summary['seconds']:.1f} (plain Spark: {summary['plain_seconds']:.1f})"),
    ]
    for name, value in rows:
        print(f"  {name:<32} {value}", file=out)


def run(options: argparse.Namespace, files: dict[str, int]) -> dict[str, Any]:
    """Run both jobs; return the summary that ``--json`` writes."""
    root, parallelism = options.input, options.parallelism
    progress = Progress(len(files))
    batch_size = max(1, min(BATCH_MAX, len(files) // (parallelism * BATCH_MAX)))
    coordinator = WordCoordinator(list(files), options.faults, batch_size, progress)
    config = SidecarConfig(
        port=options.port, relay=options.relay, gateway=GatewayLimits(confirm_timeout_s=CONFIRM_TIMEOUT_S)
    )
    spark = start_spark(options)
    try:
        count_plainly(spark, root, list(files)[:1], 1)  # so that both counts find Spark's workers running
        with Sidecar(spark, config) as sidecar:
            print(f"counting the words of {len(files)} files with {parallelism} subtasks", file=sys.stderr)
            began = time.perf_counter()
            counts, words = count_coordinated(sidecar, coordinator, root, parallelism)
            seconds = time.perf_counter() - began
        statistics = words.statistics()
        print("counting them again with plain Spark", file=sys.stderr)
        began = time.perf_counter()
        plain = count_plainly(spark, root, list(files), parallelism)
        plain_seconds = time.perf_counter() - began
    finally:
        spark.stop()
    for fault in coordinator.faults_left:
        print(f"no attempt was left to {'kill' if fault == KILL else 'stop'}", file=sys.stderr)
    explain(counts, plain, changed_since(root, files))
    return {
        "exactly_once": counts == plain,
        "splits": len(files),
        "subtasks": parallelism,
        "attempts": statistics["attempts"],
        "failures": statistics["failures"],
        "failures_by_kind": statistics["failures_by_kind"],
        "resets": statistics["resets"],
        "splits_given_back": coordinator.splits_given_back,
        "events": statistics["events_sent"] + statistics["events_received"],
        "confirm_us": statistics["confirm_us"],
        "echo_us": progress.echo_us.percentiles(),
        "fact_us": statistics["fact_us"],
        "seconds": seconds,
        "plain_seconds": plain_seconds,
        "words": sum(plain.values()),
        "distinct_words": len(plain),
        "faults": [fault for fault in options.faults if fault not in coordinator.faults_left],
        "happened": progress.happened,
    }


def explain(counts: dict[str, int], plain: dict[str, int], changed: Sequence[str]) -> None:
    """Print which words differ, and whether the input is to blame."""
    differences = sorted(word for word in counts.keys() | plain.keys() if counts.get(word) != plain.get(word))
    for word in differences[:10]:
        print(f"  {word!r}: {counts.get(word)} here, {plain.get(word)} by plain Spark", file=sys.stderr)
    if differences and changed:
        print(f"{len(changed)} files have changed meanwhile, {changed[0]} among them: run it again", file=sys.stderr)


# --- Spark, without the many lines that it and Py4J write ----------------------------------------------------------


class SparkDidNotStart(Exception):
    """Spark could not start; the text is the last output of Spark's launcher."""


class JobFailed(Exception):
    """A Spark job has failed; the text is its cause without stacks."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause_of(cause))


def cause_of(error: BaseException) -> str:
    return readable(str(getattr(error, "java_exception", None) or f"{type(error).__name__}: {error}"))


def readable(text: str) -> str:
    """Spark's message, without the stacks of Java and of Python's workers."""
    before_the_stack, *_ = text.partition("Driver stacktrace:")
    noise = ("\tat ", "\t... ", "  ", "Traceback (most recent", "WARNING: Using incubator modules")
    return "\n  ".join(line for line in before_the_stack.splitlines() if line.strip() and not line.startswith(noise))


def was_interrupted(error: BaseException) -> bool:
    """Whether ``error`` came up while a Ctrl-C was pending: Py4J's cleanup after one may fail."""
    if isinstance(error, KeyboardInterrupt):
        return True
    return any(was_interrupted(before) for before in (error.__cause__, error.__context__) if before is not None)


def interrupt_quietly() -> None:
    """Turn the first Ctrl-C into a ``KeyboardInterrupt`` without stack traces on the way; further ones change nothing.

    Spark's own handler calls the JVM from within the very call that it interrupts, which cannot work; Py4J logs how
    that fails, and the interrupt, too. Leaving the sidecar, and stopping Spark, end the jobs anyway, each within its
    deadline. An interrupt in the middle of that would only cut off a message of Py4J to the JVM, and leave Py4J
    unusable.
    """

    def interrupt_once(*unused: object) -> None:
        signal.signal(signal.SIGINT, lambda *unused: None)
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt_once)
    logging.getLogger().addFilter(lambda record: "while sending command" not in record.getMessage())


def start_spark(options: argparse.Namespace) -> SparkSession:
    """A session that logs nothing, except with ``--verbose``.

    Raises ``SparkDidNotStart`` if Java is missing or too old, or there is no such master or server.
    """
    for name in ("headgate", "py4j"):  # Py4J logs much about a Ctrl-C
        logging.getLogger(name).setLevel(logging.INFO if options.verbose else logging.CRITICAL)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder: SparkSession.Builder = SparkSession.builder
    if not options.remote or options.remote.startswith("local"):
        for key, value in SPARK_SETTINGS.items():
            builder = builder.config(key, value)
    builder = builder.remote(options.remote) if options.remote else builder.master(options.master)
    with tempfile.TemporaryFile() as launcher_log:
        try:
            # PySpark leaves a JVM behind that is interrupted while it starts, and it would run forever.
            with interrupts_held_back(), stderr_goes_to(2 if options.verbose else launcher_log.fileno()):
                spark = builder.appName("headgate word count").getOrCreate()
        except (*SPARK_ERRORS, OSError, ImportError) as error:
            launcher_log.seek(0)
            said = readable(launcher_log.read().decode(errors="replace"))
            if "SparkException" not in said and not options.remote:
                java_home = os.environ.get("JAVA_HOME") or "not set"
                said += f"\n  Spark needs Java 17 or later, and JAVA_HOME is {java_home}"
            raise SparkDidNotStart(f"{cause_of(error)}\n  {said}".rstrip()) from error
    if not options.verbose:
        interrupt_quietly()
    if not options.remote:
        spark.sparkContext.setLogLevel("WARN" if options.verbose else "OFF")
    return spark


@contextmanager
def stderr_goes_to(descriptor: int) -> Iterator[None]:
    """Processes that are started meanwhile write their errors there, for their whole life."""
    kept = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


# --- the command ----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="word_count", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    text = "folder whose text files are counted (default: the standard library of this Python, %(default)s)"
    option("--input", type=Path, default=stdlib, metavar="DIR", help=text)
    option("--parallelism", type=int, default=4, metavar="N", help="subtasks (default: %(default)s)")
    option("--master", metavar="URL", help="Spark master (default: local[N,4], N being the parallelism)")
    text = "use Spark Connect: the URL of a server that shares this machine's files, or local for one that is started"
    option("--remote", metavar="URL", help=text)
    text = "comma-separated: kill (SIGKILL), unresponsive (SIGSTOP); or none (default: %(default)s)"
    option("--faults", default=",".join(FAULTS), help=text)
    option("--relay", choices=("jvm", "py4j"), default="jvm", help="how Spark's facts are fetched")
    option("--port", type=int, default=0, help="port that tasks connect to (default: a free one)")
    option("--json", type=Path, metavar="FILE", help="write the summary there too")
    option("--verbose", action="store_true", help="log what the sidecar and Spark say")
    options = parser.parse_args(arguments)
    if options.parallelism < 1:
        parser.error(f"--parallelism must be at least 1, not {options.parallelism}")
    if not 0 <= options.port <= 65535:
        parser.error(f"--port must be between 0 and 65535, not {options.port}")
    options.faults = [fault for fault in options.faults.split(",") if fault not in ("", "none")]
    for fault in options.faults:
        if fault not in FAULTS:
            parser.error(f"--faults: {fault!r} is none of {', '.join(FAULTS)} and none")
    options.master = options.master or f"local[{options.parallelism},4]"
    if options.remote == "local":
        options.remote = options.master
    if options.faults and re.fullmatch(r"local(\[[^,]*\])?", options.master):
        parser.error(f"--master: {options.master} retries no task: write local[N,4], or --faults none")
    options.input = options.input.absolute()
    if not options.input.is_dir():
        parser.error(f"--input: {options.input} is not a folder")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: the folder of {options.json} does not exist")
    if options.json and options.json.is_dir():
        parser.error(f"--json: {options.json} is a folder")
    options.files, left_out = find_files(options.input)
    if not options.files:
        parser.error(f"--input: {options.input} holds no text files ({left_out} binary or unreadable)")
    if left_out:
        print(f"{left_out} binary or unreadable files are left out", file=sys.stderr)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = parse_arguments(arguments)
        summary = run(options, options.files)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except JobFailed as error:
        if was_interrupted(error):
            print("interrupted", file=sys.stderr)
            return 130
        print(f"the Spark job has failed: {error}\n(--verbose tells more)", file=sys.stderr)
        return 1
    except SparkDidNotStart as error:
        print(f"Spark did not start: {error}", file=sys.stderr)
        return 2
    except HeadgateError as error:
        print(f"the sidecar refuses: {error}", file=sys.stderr)
        return 2
    report(summary, sys.stdout)
    print(f"exactly once: {'yes' if summary['exactly_once'] else 'no'}")
    if options.json:
        try:
            options.json.write_text(json.dumps(summary, indent=2) + "\n")
        except OSError as error:
            print(f"--json: {error}", file=sys.stderr)
            return 2
    return 0 if summary["exactly_once"] else 1


if __name__ == "__main__":
    sys.exit(main())
