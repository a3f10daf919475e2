"""Folders are whole or absent, a damaged checkpoint is never taken, a full disk says so."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

from nemo_qad import files as folders
from nemo_qad.checkpoint.tensors import TENSORS, load_tensors, save_tensors
from nemo_qad.errors import UserError
from nemo_qad.files import disk_errors, new_folder, read_json, require_space, write_json

TENSOR = {"a": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "b": torch.tensor([0.1])}


def test_tensors_come_back_bit_for_bit_with_their_meta(tmp_path):
    save_tensors(tmp_path / "x", TENSOR, {"step": 7})
    tensors, meta = load_tensors(tmp_path / "x")
    assert meta["step"] == 7 and tensors.keys() == TENSOR.keys()
    assert all(torch.equal(tensors[k], TENSOR[k]) and tensors[k].dtype == TENSOR[k].dtype for k in TENSOR)


def test_files_can_be_read_by_who_serves_them(tmp_path):
    before = os.umask(0o022)
    try:
        save_tensors(tmp_path / "x", TENSOR, {})
    finally:
        os.umask(before)
    assert (tmp_path / "x" / TENSORS).stat().st_mode & 0o777 == 0o644


def test_views_of_one_buffer_are_saved(tmp_path):
    base = torch.arange(8.0)
    save_tensors(tmp_path / "x", {"first": base[:4], "second": base[2:6]}, {})
    assert torch.equal(load_tensors(tmp_path / "x")[0]["second"], base[2:6])


def test_interrupted_write_leaves_the_old_folder_and_no_rest(tmp_path):
    save_tensors(tmp_path / "x", TENSOR, {"step": 1})

    def write_half() -> None:
        with new_folder(tmp_path / "x") as temporary:
            (temporary / TENSORS).write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert load_tensors(tmp_path / "x")[1]["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_damaged_tensors_are_refused_by_name(tmp_path, damage):
    save_tensors(tmp_path / "x", TENSOR, {})
    path = tmp_path / "x" / TENSORS
    raw = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(raw[:-1])
    else:
        raw[-1] ^= 1
        path.write_bytes(raw)
    with pytest.raises(UserError, match=TENSORS):
        load_tensors(tmp_path / "x")


def test_no_room_is_said_before_writing(tmp_path):
    with pytest.raises(UserError, match="MiB are free"):
        require_space(tmp_path / "not" / "yet", 2**60, "a test")
    require_space(tmp_path, 1, "a test")


def test_full_disk_while_writing_is_a_user_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    save_tensors(tmp_path / "x", TENSOR, {"step": 1})
    monkeypatch.setattr(folders, "flush", full)
    with pytest.raises(UserError, match="disk is full"):
        save_tensors(tmp_path / "x", TENSOR, {"step": 2})
    assert load_tensors(tmp_path / "x")[1]["step"] == 1
    with pytest.raises(OSError, match="other"), disk_errors(tmp_path):
        raise OSError(errno.EIO, "other")


def test_json_is_atomic_and_broken_json_is_named(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    assert read_json(tmp_path / "a.json") == {"x": 1}
    (tmp_path / "a.json").write_text(json.dumps({"x": 1})[:-1])
    with pytest.raises(UserError, match=r"a\.json"):
        read_json(tmp_path / "a.json")
