"""What serving needs beyond drot itself: packages and a newer transformers, or an engine with a plugin."""

import logging
import sys
from collections.abc import Collection
from importlib.metadata import version
from importlib.util import find_spec

from drot.core.errors import UserError, quoted

logger = logging.getLogger("drot")

PACKAGES = ("fastapi", "uvicorn", "openai")
#: the first transformers whose server batches without a download of attention kernels from the hub
OLDEST_TRANSFORMERS = (5, 20)


def check_requirements() -> None:
    """Raises UserError with the pip command if a package of the extra `serve` is missing or too old."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise UserError(
            f"a server needs the package {' and '.join(missing)}: pip install {' '.join(missing)}"
        )
    found = version("transformers")
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise UserError(
            f"a server needs transformers {oldest} or newer, got {found}: "
            f"pip install 'transformers>={oldest},<6'"
        )


def warn_of_engine(engine: str, tested: str, error: Exception) -> None:
    """Logs why an engine cannot serve checkpoints of drot. tested: its version with which the tests ran."""
    package = engine.lower()
    found = getattr(sys.modules.get(package), "__version__", "an unknown version")
    logger.warning(
        "%s cannot serve checkpoints of drot: the plugin needs %s %s, got %s (%s): pip install '%s==%s'",
        engine, engine, tested, found, quoted(error), package, tested,
    )  # fmt: skip


def check_family(engine: str, families: Collection[str], family: str) -> None:
    """Raises UserError for a family that the plugin for an engine does not have."""
    if family not in families:
        raise UserError(
            f"drot's plugin for {engine} has the families {', '.join(families)}, got {family}: serve this "
            "checkpoint by `drot serve`"
        )
