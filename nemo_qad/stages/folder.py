"""The run folder: one configuration, one owner at a time, and what is finished in it.

Another configuration than the folder's may continue it as far as `resume.py` says; the folder takes it over then.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import IO, Any

from nemo_qad import agreement, resume
from nemo_qad.config import config_hash, from_yaml, to_yaml
from nemo_qad.errors import ConfigError, RunFolderError, UserError
from nemo_qad.files import disk_errors, flush, read_json, replace_text, sha256, write_json
from nemo_qad.schema import RunConfig, Stage


class RunFolder:
    """RUN/config.yaml and its hash, RUN/stages/NAME.json as done-markers, RUN/.lock held by the owner.

    RUN/config_history.jsonl has what was changed on resume, RUN/restarts.json how often QAD was begun anew.
    Of several ranks the first owns it; the others know from it what is finished, and write no marker.

    Attributes:
        remarks: what opening it changed, in words.
    """

    def __init__(self, path: Path, run: RunConfig, *, owner: bool = True) -> None:
        """
        Raises:
            RunFolderError: another process or configuration has the folder.
        """
        self.path = path
        self._lock: IO[str] | None = None
        self._results: dict[Stage, dict[str, Any]] = {}
        self.remarks: list[str] = []
        if owner:
            self._open(run)

    def _open(self, run: RunConfig) -> None:
        path = self.path
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            self._take(path / ".lock")
        self._check_or_write_config(run)
        self._restart(run.resume.restart)
        for stage in Stage:
            if self.marker(stage).exists():
                self._results[stage] = read_json(self.marker(stage))

    def share(self) -> None:
        """Tells every rank what is finished; once, when the ranks have met."""
        self._results = agreement.from_first(self._results)

    def _take(self, lock: Path) -> None:
        self._lock = lock.open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(
                f"run_dir={self.path}: another process works in it. Wait for it, or choose another run_dir"
            ) from None

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _check_or_write_config(self, run: RunConfig) -> None:
        marker = self.path / "config.sha256"
        if marker.exists():
            if marker.read_text(encoding="utf-8").strip() != config_hash(run):
                self._take_over(run)
            return
        if any(self.path.glob("stages/*.json")):
            raise RunFolderError(f"run_dir={self.path}: holds stages but no config.sha256. Choose another run_dir")
        self._write_config(run)

    def _take_over(self, run: RunConfig) -> None:
        """Makes `run` the folder's configuration, or raises RunFolderError where it must not be."""
        try:
            before = from_yaml((self.path / "config.yaml").read_text(encoding="utf-8"), check=False)
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise RunFolderError(
                f"run_dir={self.path}: belongs to another configuration, and its config.yaml cannot be read ({error}). "
                "Choose another run_dir, or leave run_dir out to get a folder for this configuration"
            ) from None
        found = resume.changes(before, run)
        if problem := resume.refusal(found, run.resume.allow):
            raise RunFolderError(f"run_dir={self.path}: {problem}")
        with disk_errors(self.path), (self.path / "config_history.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"seconds": time.time(), "changes": resume.listed(found)}) + "\n")
        for stage in resume.remade(found):
            self._forget(stage)
        self._write_config(run)
        self.remarks.append(f"continued with {'; '.join(map(str, found)) or 'an equal configuration'}")

    def _write_config(self, run: RunConfig) -> None:
        """The hash last: with the old one a start in between is compared with the new text, and finds no change."""
        replace_text(self.path / "config.yaml", to_yaml(run))
        replace_text(self.path / "config.sha256", config_hash(run) + "\n")

    def _forget(self, stage: Stage) -> None:
        self.marker(stage).unlink(missing_ok=True)

    def _restart(self, number: int) -> None:
        """Sets RUN/qad aside where the run asks for a restart not made yet. A name changes, nothing is lost."""
        record = self.path / "restarts.json"
        if number <= (read_json(record)["restarts"] if record.exists() else 0):
            return
        qad = self.path / "qad"
        if qad.exists():
            aside = next(p for n in range(1, 10**6) if not (p := self.path / f"qad-set-aside-{n}").exists())
            for stage in (Stage.qad, Stage.evaluate, Stage.export):
                self._forget(stage)
            with disk_errors(self.path):
                os.rename(qad, aside)
                flush(self.path)
            self.remarks.append(f"resume.restart={number}: what QAD had is in {aside} now, and it begins anew")
        write_json(record, {"restarts": number})

    def marker(self, stage: Stage) -> Path:
        return self.path / "stages" / f"{stage.value}.json"

    def result(self, stage: Stage) -> dict[str, Any] | None:
        """What a finished stage reported, or None."""
        return self._results.get(stage)

    def check_files(self, stage: Stage) -> None:
        """Raises UserError on every rank when a file of a finished stage is missing or has changed."""
        agreement.first_alone(lambda: self._check_files(stage))

    def _check_files(self, stage: Stage) -> None:
        result = self.result(stage) or {}
        for name, digest in result.get("files", {}).items():
            path = self.path / name
            if not path.is_file() or sha256(path) != digest:
                raise UserError(
                    f"{path}: missing or changed since stage {stage.value} finished. Restore it, or delete "
                    f"{self.marker(stage)} to run that stage again"
                )

    def finish(self, stage: Stage, result: dict[str, Any], inputs: dict[str, Any], files: list[Path]) -> None:
        """Writes the done-marker: the first rank's result, the digests of what it wrote, and what it was made from."""
        self._results[stage] = agreement.first_alone(lambda: self._finish(stage, result, inputs, files))

    def _finish(
        self, stage: Stage, result: dict[str, Any], inputs: dict[str, Any], files: list[Path]
    ) -> dict[str, Any]:
        digests = {str(f.relative_to(self.path)): sha256(f) for f in sorted(files)}
        marker = {**result, "inputs": inputs, "files": digests}
        write_json(self.marker(stage), marker)
        return marker
