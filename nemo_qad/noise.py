"""Messages of the libraries beneath that a user of this program can do nothing about.

Silenced by their source, so that what another library or this program warns of still shows. Call before
Megatron-Core or ModelOpt is imported. NEMO_QAD_WARNINGS=1 shows everything.
"""

from __future__ import annotations

import logging
import os
import warnings

_MODULES = (r"megatron\.", r"modelopt\.", r"torch\.jit\.", r"torch\.utils\.cpp_extension", r"<string>")
_LOGGERS = ("torch.utils.cpp_extension", "megatron.core", "modelopt")


def silence() -> None:
    """Adds the filters; calling it again changes nothing."""
    if os.environ.get("NEMO_QAD_WARNINGS") == "1":
        return
    for module in _MODULES:
        warnings.filterwarnings("ignore", module=module)
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
