# SPDX-License-Identifier: Apache-2.0

"""The programs of the pages, as a reader pastes them, and a reader who follows a page to the letter.

A page is written by these rules:

* Its Python blocks, one after the other, are one program. A block with a ``title`` goes into the file of that name
  instead, after the blocks with the same title.
* A ``sh`` block with a ``title`` is run, and everything above it has been pasted by then: in the ``first terminal`` it
  goes on in the background.
* A ``text`` block is what the program or command before it prints, lines of other output aside. ``...`` stands for any
  text, and ``<!-- varies: 12 34 -->`` before the block names numbers that differ from run to run.
* ``<!-- not run: REASON -->`` before a block leaves it out.
* A port that a page names, 7650 or 7660, stands for it and the two after it; the reader takes free ones.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple, Self

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(
    r"(?:<!-- (?P<remark>not run|varies): (?P<what>[^\n]+) -->\s*)?"
    r'^(?P<indent> *)```(?P<language>\w+)(?: [^\n]*?title="(?P<title>[^"]+)")?[^\n]*\n(?P<text>.*?)^(?P=indent)```$',
    re.MULTILINE | re.DOTALL,
)
RUN_TIMEOUT_S = 580
BACKGROUND = ("first terminal", "another terminal")
PORTS = ("7650", "7660")

# Runs the files whose names it reads, one after the other, with variables of the environment: as a notebook's kernel
# would, in one Spark session.
KERNEL = """
import json, os, sys, traceback
for name, variables in map(json.loads, sys.stdin):
    os.environ.update(variables)
    os.chdir(os.path.dirname(name))
    status = "ended"
    try:
        exec(compile(open(name).read(), name, "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        status = "failed"
    print(f"\\n{name} {status}", flush=True)
"""


class Block(NamedTuple):
    """One fenced block of a page."""

    language: str
    title: str
    text: str
    varies: tuple[str, ...] = ()


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[Block]:
    for found in FENCE.finditer(page.read_text(encoding="utf-8")):
        remark, what = found["remark"], found["what"]
        if remark != "not run":
            varies = tuple(what.split()) if remark else ()
            yield Block(found["language"], found["title"] or "", dedent(found["text"]), varies)


def programs(page: Path) -> dict[str, str]:
    """Return the text of each file that a reader of the page has at the end."""
    files: dict[str, str] = {}
    for block in blocks(page):
        if block.language == "python":
            name = block.title or "page.py"
            files[name] = files.get(name, "") + block.text + "\n"
    return files


def check(block: Block, lines: Iterator[str]) -> None:
    """Find the lines of a ``text`` block among these, in order. Those after the last one stay in the iterator."""
    seen = []
    for expected in map(str.strip, block.text.splitlines()):
        if expected in ("", "..."):
            continue
        pattern = ".*".join(map(re.escape, expected.split("...")))
        for number in block.varies:
            pattern = re.sub(rf"(?<!\d){re.escape(re.escape(number))}(?!\d)", r"[\\d.]+", pattern)
        for line in lines:
            seen.append(line)
            if re.fullmatch(pattern, line.strip()):
                break
        else:
            raise AssertionError(
                f"the page says that {expected!r} is printed, and after the lines before it came:\n" + "\n".join(seen)
            )


class Terminal:
    """Runs programs and commands with the commands of ``bin_folder``, and nothing of this test's own environment."""

    def __init__(self, bin_folder: Path) -> None:
        ours = ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME", "SPARK_REMOTE")
        kept = {name: value for name, value in os.environ.items() if name not in ours}
        path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**kept, "PATH": path, "VIRTUAL_ENV": str(bin_folder.parent), "PYTHONUNBUFFERED": "1"}
        self._kernel: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_kernel()

    def run(self, command: str, folder: Path, variables: Mapping[str, str]) -> Iterator[str]:
        """Return what it prints."""
        with self.start(["sh", "-c", command], folder, variables) as process:
            said, _ = process.communicate(timeout=RUN_TIMEOUT_S)
        assert process.returncode == 0, f"{command}\n{said}"
        return iter(said.splitlines())

    def start(
        self, command: list[str], folder: Path, variables: Mapping[str, str], stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**self._environment, **variables},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run_in_kernel(self, program: Path, variables: Mapping[str, str]) -> Iterator[str]:
        """Run it in the session of the programs before it, and return what it prints."""
        if self._kernel is None:
            self._kernel = self.start(["python", "-c", KERNEL], program.parent, {}, subprocess.PIPE)
        assert self._kernel.stdin is not None
        assert self._kernel.stdout is not None
        print(json.dumps([str(program), dict(variables)]), file=self._kernel.stdin, flush=True)
        said: list[str] = []
        for line in self._kernel.stdout:
            if line == f"{program} ended\n":
                return iter(said)
            said.append(line)
            if line == f"{program} failed\n":
                break
        self._end_kernel()
        raise AssertionError("".join(said))

    def _end_kernel(self) -> None:
        if self._kernel is not None:
            self._kernel.communicate(timeout=60)  # it ends with its input
            self._kernel = None


class Reader:
    """Follows a page in an empty folder, and has set these variables, such as the address of a server."""

    def __init__(self, folder: Path, terminal: Terminal, variables: Mapping[str, str]) -> None:
        self._folder = folder
        self._terminal = terminal
        self._variables = variables
        self._ports = {port: str(free_ports()) for port in PORTS}
        self._pasted = ""
        self._claims: list[Block] = []  # what the pasted program prints
        self._lines: Iterator[str] = iter(())  # what the last command has printed, and nobody has looked at
        self._background: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._background:
            process.terminate()
            process.communicate(timeout=60)

    def follow(self, page: Path) -> None:
        found = list(blocks(page))
        alone = any(".remote(" in block.text for block in found)  # a session of the other kind
        before = ""
        for block in found:
            text = self._with_free_ports(block.text)
            match block.language, block.title:
                case "python", "":
                    self._pasted += text + "\n"
                case "python", title:
                    with (self._folder / title).open("a", encoding="utf-8") as file:
                        file.write(text + "\n")
                case "text", _ if before == "python":
                    self._claims.append(block._replace(text=text))
                case "text", _ if before == "sh":
                    check(block._replace(text=text), self._lines)
                case "sh", title if title in BACKGROUND:
                    self._background.append(self._terminal.start(text.split(), self._folder, self._variables))
                    assert self._background[-1].stdout is not None
                    self._lines = self._background[-1].stdout
                case "sh", title if title:
                    self._run_pasted(alone=alone)
                    for command in text.splitlines():
                        self._type(command)
            if block.language != "text":
                before = block.language if block.language == "python" or block.title else ""
        self._run_pasted(alone=alone)

    def _with_free_ports(self, text: str) -> str:
        for port, free in self._ports.items():
            text = text.replace(port, free)
        return text

    def _run_pasted(self, *, alone: bool) -> None:
        if self._pasted:
            program = self._folder / "page.py"
            program.write_text(self._pasted, encoding="utf-8")
            self._pasted = ""
            if alone:
                self._lines = self._terminal.run("python page.py", self._folder, self._variables)
            else:
                self._lines = self._terminal.run_in_kernel(program, self._variables)
            for claim in self._claims:
                check(claim, self._lines)
            self._claims.clear()

    def _type(self, command: str) -> None:
        """The environment is there already, and on the path."""
        if command.startswith("cd "):
            self._folder /= command.removeprefix("cd ")
        elif command and not command.startswith((". ", "python3 -m venv", "pip install")):
            self._lines = self._terminal.run(command, self._folder, self._variables)


def free_ports() -> int:
    """Return the first of three free ports in a row."""
    while True:
        with ExitStack() as taken:
            first = taken.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                for port in (first + 1, first + 2):
                    taken.enter_context(socket.create_server(("127.0.0.1", port)))
            except (OSError, OverflowError):
                continue
            return int(first)
