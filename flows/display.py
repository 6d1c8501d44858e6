"""What a run shows: a live view in a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column

from flows.runner import log_of

_PLAIN_SECONDS = 20.0
_FAILURE_LINES = 20


class Display:
    """Stages of a run: how many are over, and for each running one its time and its latest line of output."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._overall = Progress(
            TextColumn("[bold]stages"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._bar = self._overall.add_task("stages", total=total)
        self._stages = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[line]}", markup=False, style="dim", table_column=Column(no_wrap=True)),
            console=console,
        )
        self._live = Live(Group(self._stages, self._overall), console=console, refresh_per_second=4)
        self._tasks = {}  # type: ignore[var-annotated]
        self._started: dict[str, float] = {}
        self._shown: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def started(self, stage: str) -> None:
        """A stage begins."""
        self._started[stage] = self._shown[stage] = time.monotonic()
        self._tasks[stage] = self._stages.add_task(stage, total=None, line="")
        if not self._console.is_terminal:
            self._say(f"start {stage}")

    def line(self, stage: str, text: str) -> None:
        """A stage printed ``text``; outside a terminal only one in twenty seconds is shown."""
        self._stages.update(self._tasks[stage], line=text)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._shown[stage] >= _PLAIN_SECONDS:
            self._shown[stage] = now
            self._say(f"      {stage}: {text}")

    def finished(self, stage: str, succeeded: bool, covers: int) -> None:
        """A stage ended, which stands for ``covers`` of DVC's; of a failed one the last lines are shown."""
        self._stages.remove_task(self._tasks.pop(stage))
        self._overall.advance(self._bar, covers)
        seconds = time.monotonic() - self._started[stage]
        if succeeded:
            self._say(f"[green]done[/]  {stage} ({seconds:.1f} s)")
            return
        log = log_of(stage)
        lines = log.read_text(encoding="utf-8").splitlines()[-_FAILURE_LINES:]
        self._say(f"[red]FAILED[/] {stage} ({seconds:.1f} s); its last lines, all of them in {log}:")
        for text in lines:
            self._say(f"    {escape(text)}")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)
