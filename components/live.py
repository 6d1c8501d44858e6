"""Curves of a running stage: a line of JSON per step always, and MLflow where a server is named and answers."""

import json
import os
import queue
import re
import sys
import threading
from pathlib import Path
from typing import Any

from components.common import STATE

SERVER = "MLFLOW_TRACKING_URI"
LAST_SECONDS = 10.0  # how long a finished stage waits for the server to take the last steps
# A server that does not answer must not keep the sender for minutes.
PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


class LiveCurves:
    """Takes a stage's log rows as they come.

    ``state/live/<profile>-<stage>-<variant>.jsonl`` holds every row, also those from before an interruption. Where the
    environment names an MLflow server a thread of its own sends them there. Whatever fails, here or there, is said once
    and never stops the training.
    """

    def __init__(self, profile: str, stage: str, variant: str, work: Path) -> None:
        self.file = STATE / "live" / f"{profile}-{stage}-{variant}.jsonl"
        self.written = self.sent = 0
        self.failed = False
        self.run_of = (profile, f"{stage} {variant}", work / "mlflow_run")
        self.sender: _Sender | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> None:
        """``rows`` are all rows so far; those not seen before are written.

        Of several processes the main one alone calls this, so the sender starts here and there is one run.
        """
        server = os.environ.get(SERVER)
        if server and self.sender is None:
            self.sender = _Sender(server, *self.run_of)
        if self.sender:
            for row in rows[self.sent :]:
                self.sender.rows.put(row)
            self.sent = len(rows)
        try:
            self._write(rows)
        except OSError as error:
            self.written = 0  # whatever was cut short is written anew
            if not self.failed:
                print(f"no live curves in {self.file} ({error.strerror}); training goes on", file=sys.stderr)
            self.failed = True

    def _write(self, rows: list[dict[str, Any]]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a" if self.written else "w", encoding="utf-8") as handle:
            handle.writelines(json.dumps(row) + "\n" for row in rows[self.written :])
        self.written = len(rows)

    def close(self) -> None:
        """Wait a little for what is still to be sent."""
        if self.sender:
            self.sender.rows.put(None)
            self.sender.join(LAST_SECONDS)


class _Sender(threading.Thread):
    """Sends rows to MLflow, as many at a time as have gathered; a resumed stage goes on in the same run."""

    def __init__(self, server: str, profile: str, name: str, run_file: Path) -> None:
        super().__init__(daemon=True)
        self.server, self.profile, self.name_, self.run_file = server, profile, name, run_file
        self.rows: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        try:
            self._send()
        except Exception as error:  # whatever a server may do, training goes on
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            reason = re.sub(r"//[^/@\s]*@", "//", reason)  # an address may hold a password
            print(f"{self.name_}: no live curves at {SERVER} ({reason}); training goes on", file=sys.stderr)

    def _send(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        client = MlflowClient(self.server)
        run = self._run(client)
        open_ended = True
        while open_ended:
            rows = [self.rows.get()]
            while not self.rows.empty():
                rows.append(self.rows.get())
            open_ended = None not in rows
            metrics = [
                Metric(name, float(value), 0, row["step"])
                for row in rows
                if row is not None
                for name, value in row.items()
                if value is not None and name != "step"
            ]
            for start in range(0, len(metrics), 1000):  # the server takes no more at a time
                client.log_batch(run, metrics[start : start + 1000])
        client.set_terminated(run)

    def _run(self, client: Any) -> str:
        if self.run_file.exists():
            run = self.run_file.read_text(encoding="utf-8")
            client.update_run(run, status="RUNNING")
            return run
        title = f"{self.profile} live"
        experiment = client.get_experiment_by_name(title)
        number = experiment.experiment_id if experiment else client.create_experiment(title)
        run = str(client.create_run(number, run_name=self.name_).info.run_id)
        self.run_file.parent.mkdir(parents=True, exist_ok=True)
        self.run_file.write_text(run, encoding="utf-8")
        return run
