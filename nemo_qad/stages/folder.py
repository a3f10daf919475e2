"""The run folder: one configuration, one owner at a time, and what is finished in it."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO, Any

from nemo_qad import agreement
from nemo_qad.config import config_hash, to_yaml
from nemo_qad.errors import RunFolderError, UserError
from nemo_qad.files import disk_errors, read_json, sha256, write_json
from nemo_qad.schema import RunConfig, Stage


def _differences(old: str, new: str) -> str:
    """The first lines in which two configurations differ, for a message."""
    before, after = set(old.splitlines()), set(new.splitlines())
    changed = [line.strip() for line in new.splitlines() if line not in before]
    was = [line.strip() for line in old.splitlines() if line not in after]
    return f"now {', '.join(changed[:4]) or 'fewer keys'}; there {', '.join(was[:4]) or 'fewer keys'}"


class RunFolder:
    """RUN/config.yaml and its hash, RUN/stages/NAME.json as done-markers, RUN/.lock held by the owner.

    Of several ranks the first owns it; the others know from it what is finished, and write no marker.
    """

    def __init__(self, path: Path, run: RunConfig, *, owner: bool = True) -> None:
        """
        Raises:
            RunFolderError: another process or configuration has the folder.
        """
        self.path = path
        self._lock: IO[str] | None = None
        self._results: dict[Stage, dict[str, Any]] = {}
        if owner:
            self._open(run)

    def _open(self, run: RunConfig) -> None:
        path = self.path
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            self._take(path / ".lock")
        self._check_or_write_config(run)
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
        digest, text = config_hash(run), to_yaml(run)
        config, marker = self.path / "config.yaml", self.path / "config.sha256"
        if marker.exists():
            if marker.read_text(encoding="utf-8").strip() != digest:
                detail = _differences(config.read_text(encoding="utf-8"), text) if config.exists() else ""
                raise RunFolderError(
                    f"run_dir={self.path}: belongs to another configuration ({detail}). "
                    "Choose another run_dir, or leave run_dir out to get a folder for this configuration"
                )
            return
        if any(self.path.glob("stages/*.json")):
            raise RunFolderError(f"run_dir={self.path}: holds stages but no config.sha256. Choose another run_dir")
        with disk_errors(self.path):
            config.write_text(text, encoding="utf-8")
            marker.write_text(digest + "\n", encoding="utf-8")

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
